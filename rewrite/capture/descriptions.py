"""Describe the arguments and results of a call on fakes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch

from rewrite import calls
from rewrite.capture import private


def leaf_names(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A name for each leaf of a call, after the forward's own arguments."""
    try:
        parameters = list(inspect.signature(forward).parameters)
    except (TypeError, ValueError):
        parameters = []
    named = [(parameters[i] if i < len(parameters) else f"args_{i}", value) for i, value in enumerate(args)]
    named += list(kwargs.items())
    walked: list[Any] = []
    names: list[str] = []
    for name, value in named:
        walked.append(value)
        count = len(calls.split(tuple(walked)).leaves) - len(names)
        names += [name] if count == 1 else [f"{name}_{index}" for index in range(count)]
    # `forward(x, /, **others)` may be given another `x`.
    return [f"{name}_again" if name in names[:place] else name for place, name in enumerate(names)]


def size_key(size: Any) -> Hashable:
    """A size as something that can be compared without a guard."""
    key: Hashable = private.expression(size) if isinstance(size, torch.SymInt) else size
    return key


def tensor_versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, int]]:
    """The tensors a call is given and how often each has been written, to find what the call writes."""
    values = [*args, *kwargs.values()]
    values += [item for value in values if isinstance(value, (list, tuple)) for item in value]
    return [(value, value._version) for value in values if isinstance(value, torch.Tensor) and not value.is_inference()]


def fresh_like(leaf: Any) -> Any:
    """A fake with the description of `leaf` and a history of its own."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    fresh = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return fresh.requires_grad_().clone() if leaf.requires_grad else fresh


def defined_at(function: Callable[..., Any]) -> str:
    """Where a function begins, as `file.py:12`; empty for one that is not Python's."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def first_line(error: BaseException) -> str:
    """An error in one short line."""
    text = str(error).strip().split("\n")[0][:160]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
