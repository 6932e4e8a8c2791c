"""How far rounding moves what a model computes: measured, because it differs by orders of magnitude between models.

The model is run again with what goes into and comes out of every matrix product moved at random, forward and backward,
by a few unit roundoffs of the low precision: Monte Carlo arithmetic (Parker, Monte Carlo Arithmetic, UCLA CSD-970002,
1997) at the places where mixed precision rounds. A few such runs estimate a condition number within a small factor
(Kenney and Laub, Small-sample statistical condition estimates for general matrix functions, SIAM J. Sci. Comput. 15(1),
1994). Runs come in pairs of opposite moves: a ReLU whose argument is next to zero changes sides in one of the two.

A bound from the number of layers alone holds for smooth models only. Where a ReLU or a maximum changes sides, or a
batch norm divides by the spread of two images, gradients move by far more: those of a small ResNet over two images by
45% in fp16, under torch.autocast as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from rewrite.certificate import Row
from rewrite.observation import Observation, observe
from rewrite.tolerance import MARGIN, magnitude

PAIRS = 8
"""Most pairs of runs; another is made only while a value lies farther off than those before have moved it."""
STRETCH = math.sqrt(MARGIN)
"""How many unit roundoffs a move is, and how many times as far as it moved a value may be off: together the margin."""
PRODUCTS = frozenset({
    "linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "addbmm", "addmv",
    "baddbmm", "dot", "inner", "einsum", "tensordot", "chain_matmul", "multi_dot", "linalg_multi_dot",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "conv_tbc",
    "scaled_dot_product_attention", "multi_head_attention_forward", "grouped_mm", "_grouped_mm",
    "lstm", "lstm_cell", "gru", "gru_cell", "rnn_tanh", "rnn_relu", "rnn_tanh_cell", "rnn_relu_cell",
})  # fmt: skip
"""Functions that compute in low precision under torch.autocast (ATen/autocast_mode.h, lower_precision_fp)."""


class Sensitivity:
    """Steps of one model in which every rounding is a random one."""

    def __init__(self, module: nn.Module, low: torch.dtype) -> None:
        """`low`: the precision whose unit roundoff moves values."""
        self.module, self.low = module, low

    def of(
        self,
        expected: Observation,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        seed: int,
        train: bool,
        scale: float = 1.0,
    ) -> Moved:
        """How far the step moves that `expected` was observed of; nothing is run before it is asked.

        `scale` is the loss scale of the other step: what its gradients are multiplied by when they are rounded.
        """

        def moved(pair: int, sign: int) -> Observation:
            with _Rounding(_Noise(sign * STRETCH, self.low, scale, pair)):
                return observe(self.module, args, kwargs, seed=seed, train=train)

        return Moved(expected, moved, str(self.low).removeprefix("torch."))


class Moved:
    """How far the values of a step moved under random roundings, and what that allows another step."""

    def __init__(self, expected: Observation, run: Callable[[int, int], Observation], low: str) -> None:
        """`run` observes the step of a pair, by number, and a sign."""
        self.values, self.run, self.low = _by_kind(expected), run, low
        self.pairs = 0
        self._largest: dict[tuple[str, str], float] = {}
        self._together: dict[str, float] = {}

    def widened(self, rows: Iterable[Row], found: Observation) -> list[Row]:
        """Each row with what it is allowed besides: twice as far as the value itself moved, or as far as all of its
        kind moved together, in the 2-norm and relative to their size.

        One that is zero throughout, as a dropped one is, is allowed as far as the value itself moved and no more. One
        that is handed out in half precision is rounded once more: by u relative to its size, or, below the normal
        numbers, by the spacing of the others (Higham, section 2.1).
        """
        rows, steps = list(rows), _by_kind(found)
        while True:
            widened = [self._widened(row, steps.get(row.kind, {}).get(row.name)) for row in rows]
            near = (row.passed or not math.isfinite(row.max_abs) for row in widened if row.kind in self.values)
            if all(near) or self.pairs == PAIRS:
                return widened
            for sign in (1, -1):
                self._take(_by_kind(self.run(self.pairs, sign)))
            self.pairs += 1

    def _widened(self, row: Row, found: torch.Tensor | None) -> Row:
        value = self.values.get(row.kind, {}).get(row.name)
        if value is None or found is None or not value.is_floating_point():
            return row
        moved = self._largest.get((row.kind, row.name), 0.0)
        if bool(found.any()):
            moved = STRETCH * max(moved, self._relative(row.kind) * magnitude(value))
            moved += MARGIN * _spacing(value, found.dtype)
        return replace(row, tolerance=row.tolerance + moved)

    def _take(self, step: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for kind, values in self.values.items():
            gaps = dict(_gaps(values, step[kind]))
            for name, gap in gaps.items():
                self._largest[kind, name] = max(self._largest.get((kind, name), 0.0), float(gap.abs().max()))
            size = math.sqrt(sum(_squares(values[name].detach().double()) for name in gaps))
            moved = math.sqrt(sum(map(_squares, gaps.values())))
            self._together[kind] = max(self._relative(kind), moved / size if size else 0.0)

    def undecided(self) -> Iterator[str]:
        """The kinds of values of which random roundings leave nothing, in words."""
        for kind in self.values:
            moved = self._relative(kind)
            if STRETCH * moved >= 1:
                yield f"{kind}: roundings to {self.low} move it by {moved:.0%}, so that nearness says little"

    def _relative(self, kind: str) -> float:
        return self._together.get(kind, 0.0)


def _spacing(value: torch.Tensor, held: torch.dtype) -> float:
    """How far a value moves that is held in a precision lower than its own."""
    if not held.is_floating_point or torch.finfo(held).bits >= torch.finfo(value.dtype).bits:
        return 0.0
    limits = torch.finfo(held)
    return limits.eps / 2 * magnitude(value) + limits.smallest_normal * limits.eps


def _by_kind(step: Observation) -> dict[str, dict[str, torch.Tensor]]:
    gradients = {name: value for name, value in step.gradients.items() if value is not None}
    return {
        "loss": {"loss": step.loss},
        "output": dict(step.outputs),
        "gradient": gradients,
        "buffer": dict(step.buffers),
    }


def _gaps(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Differences, where both are finite."""
    for name, value in expected.items():
        other = found.get(name)
        if other is None or not value.is_floating_point() or value.numel() == 0 or other.shape != value.shape:
            continue
        gap = value.detach().double() - other.detach().double()
        yield name, gap.nan_to_num(0.0, 0.0, 0.0)


def _squares(value: torch.Tensor) -> float:
    return float(value.nan_to_num(0.0, 0.0, 0.0).square().sum())


class _Rounding(TorchFunctionMode):
    """Products whose operands and results are moved."""

    def __init__(self, noise: _Noise) -> None:
        super().__init__()
        self.noise = noise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        args, kwargs = pytree.tree_map(self.noise.both_ways, (args, kwargs or {}))
        return pytree.tree_map(self.noise.both_ways, func(*args, **kwargs))


class _Noise:
    """Moves each number by some unit roundoffs up or down, at random; leaves every random stream alone.

    Below the normal numbers a unit is half of their spacing, which does not shrink (the model of arithmetic with
    underflow, Higham, Accuracy and Stability of Numerical Algorithms, section 2.1). Zero stays.
    """

    def __init__(self, units: float, low: torch.dtype, scale: float, seed: int) -> None:
        """`units` of the precision `low`; gradients are `scale` times as large when they are rounded."""
        limits = torch.finfo(low)
        self.units, self.roundoff, self.least = units, limits.eps / 2, limits.smallest_normal * limits.eps / 2
        self.scale = scale
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self._moved(value, self.least)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        return self._moved(gradient, self.least / self.scale)

    def _moved(self, value: torch.Tensor, least: float) -> torch.Tensor:
        signs = torch.randint(0, 2, value.shape, generator=self.generator, dtype=torch.int8).to(value.device)
        unit = (value.abs() * self.roundoff).clamp_(min=least)
        moved = value + unit * (signs.to(value.dtype) * 2 - 1) * self.units
        stays = (value == 0) | ~moved.isfinite()  # the least number, of a mask, stays too
        return torch.where(stays, value, moved)

    def both_ways(self, value: Any) -> Any:
        """The same for a tensor of floating-point numbers, and for its gradient; anything else is as it was."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return _Perturb.apply(value, self)  # type: ignore[no-untyped-call]


class _Perturb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, noise: _Noise) -> torch.Tensor:
        ctx.noise = noise
        return noise.forward(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.noise.backward(grads[0]), None
