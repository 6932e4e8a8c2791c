"""Capture a module: run sessions until every part has a graph or a reason why not, within a bound of time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rewrite import calls
from rewrite.capture.captured import Captured, StoppedError, TimeUpError
from rewrite.capture.recorder import OpaqueError
from rewrite.capture.session import Session
from rewrite.capture.structure import Structure, join_path, path_below
from rewrite.capture.surroundings import random_states_kept
from rewrite.errors import CaptureError
from rewrite.program import Opaque

SECONDS_PER_LEVEL = (40.0, 40.0, 60.0)
"""How long a capture may take with batch and sequence symbolic, with the batch alone, and with fixed sizes."""
MAX_RESTARTS = 64


@dataclass
class Capture:
    """What one capture found."""

    regions: list[Captured] = field(default_factory=list)
    opaque: tuple[Opaque, ...] = ()
    assumptions: tuple[str, ...] = ()
    seconds: float = 0.0


def capture_module(
    root: nn.Module,
    path: str,
    structure: Structure,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    flags: Callable[[nn.Module, str], Hashable],
    original_forward: Callable[[nn.Module], Callable[..., Any]],
    opaque: dict[str, str] | None = None,
) -> Capture:
    """Capture `root`, which stands at `path` in its model, for a call with these arguments.

    Nothing is computed and the module is left as it was. Raises CaptureError when the forward itself fails.
    """
    started = time.monotonic()
    attempt: Attempt | None = None
    for level, seconds in enumerate(SECONDS_PER_LEVEL):
        start = functools.partial(
            Session,
            root,
            path,
            structure,
            flags=flags,
            original_forward=original_forward,
            level=level,
            deadline=time.monotonic() + seconds,
        )
        given = {name: OpaqueError(name, reason) for name, reason in (opaque or {}).items()}
        attempt = _attempt(start, args, kwargs, path, structure, given)
        if attempt is not None and attempt.stopped is None:
            break
    if attempt is None:
        raise CaptureError(
            f"module {path or type(root).__name__!r}",
            f"capture took longer than {SECONDS_PER_LEVEL[-1]:.0f} s even with fixed sizes",
            "name the slow part in `opaque=[...]`, so that it keeps its own forward",
        )
    if attempt.stopped is not None:
        _check_real_forward(root, path, args, kwargs, original_forward, attempt.stopped)
    reported = tuple(Opaque(error.path, error.reason, error.source) for error in attempt.found.values())
    regions = attempt.session.finish()
    return Capture(regions, reported, tuple(attempt.session.assumptions), time.monotonic() - started)


@dataclass
class Attempt:
    """The last session at one level of symbolic sizes."""

    session: Session
    found: dict[str, OpaqueError]
    stopped: StoppedError | None = None


def _attempt(
    start: Callable[..., Session],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    path: str,
    structure: Structure,
    found: dict[str, OpaqueError],
) -> Attempt | None:
    """Start anew with one more opaque module until a run ends; None when the time is up."""
    for _ in range(MAX_RESTARTS):
        session = start(opaque_paths=found)
        try:
            session.run(args, kwargs)
        except OpaqueError as error:
            _add(found, error, path, structure)
            continue
        except TimeUpError:
            return None
        except StoppedError as error:
            stopped, reason = error.args
            for unfinished in session.unfinished():
                found.setdefault(
                    unfinished, OpaqueError(unfinished, f"{stopped!r} could not be run on fakes ({reason})")
                )
            return Attempt(session, found, error)
        return Attempt(session, found)
    return None


def _add(found: dict[str, OpaqueError], error: OpaqueError, root: str, structure: Structure) -> None:
    """Enter the module, and its like in the sibling blocks; when it is known already, the module around it."""
    path = error.path
    while path in found and path != root:
        path = path.rpartition(".")[0] if len(path.rpartition(".")[0]) >= len(root) else root
    found[path] = OpaqueError(path, error.reason, error.source)
    block = next((name for name in structure.blocks if path_below(path, name) is not None), None)
    if block is None:
        return
    below = path_below(path, block) or ""
    for sibling, group in structure.blocks.items():
        if group == structure.blocks[block]:
            like = join_path(sibling, below)
            found.setdefault(like, OpaqueError(like, error.reason, error.source))


def _check_real_forward(
    root: nn.Module,
    path: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    original_forward: Callable[[nn.Module], Callable[..., Any]],
    stopped: StoppedError,
) -> None:
    """Tell a forward that cannot run on fakes from one that fails on these inputs: CaptureError for the second."""
    tensors = [*root.parameters(), *root.buffers()]
    tensors += [leaf for leaf in calls.split((args, kwargs)).leaves if isinstance(leaf, torch.Tensor)]
    real = not any(tensor.is_meta or type(tensor).__name__ == "DTensor" for tensor in tensors)
    error: BaseException | None = stopped.__cause__
    if real:
        error = _real_forward_error(root, original_forward, args, kwargs)
    if error is not None:
        raise CaptureError(
            f"the forward of {type(root).__name__}" + (f" at {path!r}" if path else ""),
            f"it raised {type(error).__name__}: {str(error).strip() or 'no message'}",
            "check that the example inputs are a call that the model accepts",
        ) from error


def _real_forward_error(
    root: nn.Module, forward: Callable[[nn.Module], Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Exception | None:
    buffers = [(buffer, buffer.detach().clone()) for buffer in root.buffers()]
    parts = calls.split((args, kwargs))
    args, kwargs = calls.rebuild(parts.skeleton, parts.leaves)  # a cache of its own: the forward may write to it
    with random_states_kept(), torch.no_grad():
        try:
            forward(root)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever the user's forward raises is the answer
            return error
        finally:
            for buffer, content in buffers:
                if not torch.equal(buffer, content):
                    buffer.copy_(content)
    return None
