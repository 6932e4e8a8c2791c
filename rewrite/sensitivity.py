"""How far rounding moves what a model computes: measured, because it differs by orders of magnitude between models.

The model is run again with random perturbations of one unit roundoff of the low precision in its weights and in what
goes into and comes out of its layers, forward and backward: Monte Carlo arithmetic (Parker, Monte Carlo Arithmetic,
UCLA CSD-970002, 1997) at the places where mixed precision rounds. A few such runs estimate a condition number within a
small factor (Kenney and Laub, Small-sample statistical condition estimates for general matrix functions, SIAM J. Sci.
Comput. 15(1), 1994): that one of three is too small by more than a factor of 4 has a probability below 2%.

A bound from the number of layers alone holds for smooth models only. Where a ReLU or a maximum changes sides, or a
batch norm divides by the spread of two images, gradients move by far more: those of a small ResNet over two images by
45% in fp16, under torch.autocast as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rewrite.certificate import Row
from rewrite.emit.tree import copy_tree
from rewrite.observation import Observation, observe
from rewrite.tolerance import MARGIN, magnitude

RUNS = 3


class Sensitivity:
    """Steps of one model in which every rounding is a random one."""

    def __init__(self, module: nn.Module, low: torch.dtype) -> None:
        """`low`: the precision whose unit roundoff perturbs."""
        roundoff = torch.finfo(low).eps / 2
        self.low = str(low).removeprefix("torch.")
        self.runs = [_perturbed(module, roundoff, seed) for seed in range(RUNS)]

    def measure(
        self, expected: Observation, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, seed: int, train: bool
    ) -> Moved:
        """How far the step moves that `expected` was observed of."""
        steps = [observe(run, args, kwargs, seed=seed, train=train) for run in self.runs]
        return Moved(expected, steps, self.low)


class Moved:
    """How far the values of a step moved under random roundings, and what that allows another step."""

    def __init__(self, expected: Observation, steps: list[Observation], low: str) -> None:
        self.values, self.low = _by_kind(expected), low
        self._largest: dict[tuple[str, str], float] = {}
        self._together: dict[str, float] = {}
        for kind, values in self.values.items():
            for step in steps:
                gaps = dict(_gaps(values, _by_kind(step)[kind]))
                for name, gap in gaps.items():
                    self._largest[kind, name] = max(self._largest.get((kind, name), 0.0), float(gap.abs().max()))
                size = math.sqrt(sum(_squares(values[name].detach().double()) for name in gaps))
                moved = math.sqrt(sum(map(_squares, gaps.values())))
                self._together[kind] = max(self._together.get(kind, 0.0), moved / size if size else 0.0)

    def widened(self, rows: Iterable[Row], found: Observation) -> Iterator[Row]:
        """Each row with what it is allowed besides: 4 times as far as the value itself moved, or as far as all of its
        kind moved together, in the 2-norm and relative to their size.

        One that is zero throughout, as a dropped one is, is allowed as far as the value itself moved and no more. One
        that is handed out in half precision is rounded once more: by u relative to its size, or, below the normal
        numbers, by the spacing of the others (Higham, section 2.1).
        """
        steps = _by_kind(found)
        for row in rows:
            value = self.values.get(row.kind, {}).get(row.name)
            other = steps.get(row.kind, {}).get(row.name)
            if value is None or other is None or not value.is_floating_point():
                yield row
                continue
            moved = self._largest.get((row.kind, row.name), 0.0)
            if bool(other.any()):
                moved = MARGIN * max(moved, self._relative(row.kind) * magnitude(value))
                moved += MARGIN * _spacing(value, other.dtype)
            yield replace(row, tolerance=row.tolerance + moved)

    def undecided(self) -> Iterator[str]:
        """The kinds of values of which random roundings leave nothing, in words."""
        for kind in self.values:
            moved = self._relative(kind)
            if MARGIN * moved >= 1:
                yield f"{kind}: rounding to {self.low} alone moves it by {moved:.0%}, so that nearness says little"

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


def _perturbed(module: nn.Module, roundoff: float, seed: int) -> nn.Module:
    """A copy of `module` with other weights, whose layers perturb what they take and give."""
    made = copy_tree(module)
    noise = _Noise(roundoff, seed)
    weights: dict[int, nn.Parameter] = {}
    for part in made.modules():
        for name, weight in part._parameters.items():
            if type(weight) is not nn.Parameter or not weight.is_floating_point():
                continue
            if id(weight) not in weights:
                with torch.no_grad():
                    value = noise(weight.detach())
                weights[id(weight)] = nn.Parameter(value, requires_grad=weight.requires_grad)
            setattr(part, name, weights[id(weight)])
        if part._parameters and not part._modules:
            part.register_forward_pre_hook(lambda _, args: tuple(map(noise.both_ways, args)))
            part.register_forward_hook(lambda _, __, output: noise.both_ways(output))
    return made


class _Noise:
    """Multiplies each element by 1 + u or 1 - u, at random; leaves every random stream alone."""

    def __init__(self, roundoff: float, seed: int) -> None:
        self.roundoff = roundoff
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, value.shape, generator=self.generator, dtype=torch.int8).to(value.device)
        return value + value * (signs.to(value.dtype) * 2 - 1) * self.roundoff

    def both_ways(self, value: Any) -> Any:
        """The same for a tensor of floating-point numbers, and for its gradient; anything else is as it was."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return _Perturb.apply(value, self)  # type: ignore[no-untyped-call]


class _Perturb(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, noise: _Noise) -> torch.Tensor:
        ctx.noise = noise
        return noise(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.noise(grads[0]), None
