"""Tensors that a forward uses beside arguments, parameters and buffers are real in a capture: writes are undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rewrite.capture.outside import outside_modes
from rewrite.capture.private import FakeTensor

_WRITING = frozenset({"__setitem__", "batch_norm", "instance_norm"})


class Undo:
    """What real tensors held before the forward first wrote to them."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def before(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`func` is about to run on these."""
        if not _writes(getattr(func, "__name__", ""), kwargs):
            return
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and id(value) not in self.held:
                with outside_modes():
                    self.held[id(value)] = (value, value.detach().clone())

    def put_back(self) -> None:
        """Give them the content they had."""
        with torch.no_grad():
            for tensor, content in self.held.values():
                tensor.copy_(content)


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function of this name writes to a tensor: `add_`, `__iadd__`, anything with `out=`."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith("__i") or name in _WRITING or kwargs.get("out") is not None
