"""What a session does with each call of a torch function."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from rewrite.capture.answers import SCALAR_QUESTIONS, SIZE_QUESTIONS
from rewrite.capture.captured import TimeUpError
from rewrite.capture.descriptions import tensor_versions
from rewrite.capture.questions import ask_inputs, guess
from rewrite.capture.stand_ins import STAND_INS
from rewrite.capture.surroundings import surroundings

if TYPE_CHECKING:
    from rewrite.capture.session import Session

SILENT = frozenset(
    """size dim numel stride is_floating_point is_contiguous __len__ element_size is_complex ndimension get_device
    untyped_storage storage_offset __hash__ __repr__ __format__ is_tensor data_ptr type_as_dtype is_signed _is_view
    __reduce_ex__ is_set_to _version __dir__ is_shared is_pinned""".split()  # noqa: SIM905 - a list of this length reads better so
)
"""Functions that only look at a tensor's description: run, never recorded."""


def call_function(session: Session, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function on fakes, record it, or answer what it asks."""
    if session.silent:
        return func(*args, **kwargs)
    if time.monotonic() > session.deadline:
        raise TimeUpError
    name = getattr(func, "__name__", "")
    if name in SILENT or (name == "__get__" and not isinstance(args[0], torch.Tensor)):
        return func(*args, **kwargs)
    if name in SCALAR_QUESTIONS:
        return _question(session, func, args, kwargs)
    if session.recorder is None and name in SIZE_QUESTIONS:
        known = session.answers.answer(func, args, kwargs)
        if known is not NotImplemented:
            return session.answers.as_fakes(known)
    versions = tensor_versions(args, kwargs) if session.recorder is not None else []
    session.silent += 1
    session.undo.before(func, args, kwargs)
    try:
        out = STAND_INS.get(func, func)(*args, **kwargs)
    except Exception:
        session.last_place = (session.module_path(), session.source())
        raise
    finally:
        session.silent -= 1
    session.silent += 1
    session.answers.follow(func, args, kwargs, out)
    session.silent -= 1
    if session.recorder is not None:
        if surroundings() != session.recorder.surroundings:
            raise session.opaque("its forward changes a global setting of torch (attention backend, dtype, autocast)")
        session.recorder.record(func, args, kwargs, out, versions)
        session.recorder.note_written(func, args, kwargs)
    return out


def _question(session: Session, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model asks for the data of a tensor."""
    answer = session.answers.answer(func, args, kwargs)
    if session.recorder is not None:
        asked = ask_inputs(session.recorder, func, args, kwargs, answer)
        if asked is None:
            raise session.opaque(f"its forward depends on the data of a tensor (`{func.__name__}`)")
        session.recorder.questions.append((asked, bool(answer)))
        return answer
    if answer is NotImplemented:
        session.assumptions.append(
            f"{session.module_path()} ({session.source()}): a value that depends on data was guessed"
        )
        return guess(func, args)
    return answer
