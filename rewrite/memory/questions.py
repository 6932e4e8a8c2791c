"""Runs operators on fakes: those that ask about data get an answer, and those without a fake kernel a stand-in."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rewrite.capture.answers import VALUE_FREE, Answers, operator_name
from rewrite.capture.outside import outside_modes
from rewrite.memory.kernels import FAKE_KERNELS, ctc_loss
from rewrite.memory.place import ModulePaths
from rewrite.memory.quick import QuickFakes

aten = torch.ops.aten


class Questions:
    """The operators of one run. Without `answers` the run is real, and each operator is called as it is."""

    def __init__(self, answers: Answers | None, modules: ModulePaths, quick: QuickFakes | None = None) -> None:
        self.assumptions: list[str] = []
        self._answers = answers
        self._modules = modules
        self._quick = quick
        self._asks: dict[Any, bool] = {}

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._answers is None:
            return func(*args, **kwargs)
        kernel = FAKE_KERNELS.get(func)
        if kernel is not None:
            return kernel(*args, **kwargs)
        asks = self._asks.get(func)
        if asks is None:
            asks = self._asks[func] = _asks(func)
        if asks:
            return self._ask(func, args, kwargs)
        out = self._quick.run(func, args, kwargs) if self._quick else func(*args, **kwargs)
        if self._may_know(func, args):
            self._answers.follow(func, args, kwargs, out)
        return out

    def _may_know(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Whether following `func` can come to anything: mostly not, and this says so cheaply."""
        assert self._answers is not None
        if not args or not isinstance(args[0], torch.Tensor) or operator_name(func) in VALUE_FREE:
            return True
        return self._answers.shadow(args[0]) is not None

    def _ask(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._answers is not None
        if func is aten.index.Tensor:
            return self._index(func, args, kwargs)
        if func is aten.masked_select.default:
            return self._masked_select(*args)
        if func is aten._ctc_loss.Tensor:
            return ctc_loss(args[0], self._longest(args[3], at_most=args[1].shape[-1]))
        known = self._answers.answer(func, args, kwargs)
        if known is not NotImplemented:
            return self._answers.as_fakes(known)
        guess = _GUESSES.get(func)
        if guess is None:
            return func(*args, **kwargs)
        value, taken = guess(*args, **kwargs)
        self._assume(f"{operator_name(func)} of a value that is not known without running was taken as {taken}")
        return value

    def _index(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Indexing by a mask is indexing by the positions where it is true, as the kernel does it."""
        assert self._answers is not None
        positions: list[torch.Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                positions.append(index)
                continue
            positions.extend(self._ask(aten.nonzero.default, (index,), {}).unbind(1))
        out = func(args[0], positions, **kwargs)
        self._answers.follow(func, args, kwargs, out)
        return out

    def _masked_select(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        assert self._answers is not None
        shape = torch.broadcast_shapes(tensor.shape, mask.shape)
        known = self._answers.shadow(mask)
        if known is None:
            self._assume("a mask that is not known without running was taken as true everywhere")
            return torch.empty(math.prod(shape), dtype=tensor.dtype)
        with outside_modes():
            count = int(known.expand(shape).sum())
        return torch.empty(count, dtype=tensor.dtype)

    def _longest(self, lengths: torch.Tensor, *, at_most: int) -> int:
        assert self._answers is not None
        known = self._answers.shadow(lengths)
        if known is None:
            self._assume(f"lengths that are not known without running were taken as {at_most}")
            return at_most
        with outside_modes():
            return int(known.max())

    def _assume(self, sentence: str) -> None:
        where = f"{self._modules.current or 'the root module'} ({user_line()}): {sentence}"
        if where not in self.assumptions:
            self.assumptions.append(where)


def user_line() -> str:
    """The innermost line, as `file.py:12`, that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(("torch.", "rewrite.")) and module not in ("torch", "contextlib"):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown line"


def _asks(func: Callable[..., Any]) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return False
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _scalar(tensor: torch.Tensor) -> tuple[Any, str]:
    value = False if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 0
    return value, str(value)


def _nonzero(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    return torch.empty(tensor.numel(), tensor.dim(), dtype=torch.int64), "true everywhere"


def _repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> tuple[torch.Tensor, str]:
    count = repeats.numel() if output_size is None else output_size
    return torch.empty(count, dtype=repeats.dtype), "one of each"


def _unique(tensor: torch.Tensor, *flags: Any, **named: Any) -> tuple[tuple[torch.Tensor, ...], str]:
    index = torch.empty(tensor.shape, dtype=torch.int64)
    values = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return (values, index, torch.empty(tensor.numel(), dtype=torch.int64)), "all different"


def _equal(*_: Any) -> tuple[bool, str]:
    return False, "False"


_GUESSES: Mapping[Any, Callable[..., tuple[Any, str]]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: _equal,
    aten.nonzero.default: _nonzero,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: _unique,
}
