"""What running a node again costs, in seconds: by its operators and a device's rates, or measured on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rewrite.memory.rates import Rates
from rewrite.memory.timeline import Work
from rewrite.memory.work import Tally

STEP_SECONDS = 5e-6
"""What a recompute adds to an operator's own time: finding its inputs, counting their uses."""

SEGMENT_SECONDS = 2e-6
"""What a recompute segment adds for each of its values, kept or not: being told of it, a token for what is saved."""


@dataclass(frozen=True)
class Effort:
    """What a node does when it runs."""

    work: tuple[Work, ...] = ()
    drawn: int = 0
    """Random numbers."""

    def seconds(self, rates: Rates) -> float:
        """On a device with these rates; each operator takes the longer of its arithmetic and its traffic."""
        return self.drawn / rates.draws + work_seconds(self.work, rates)


def work_seconds(work: Iterable[Work], rates: Rates) -> float:
    """Of all these operators on a device with these rates, one after another."""
    return sum(each.calls * _operator_seconds(each, rates) for each in work)


def step_seconds(work: Iterable[Work], rates: Rates) -> float:
    """Of these operators in a training step, each with what it takes beside its work."""
    return sum(each.calls * (_operator_seconds(each, rates) + rates.beside) for each in work)


def _operator_seconds(work: Work, rates: Rates) -> float:
    arithmetic = work.flops / (rates.half_flops if work.half else rates.flops)
    if work.fused:
        arithmetic /= rates.attention
    return max(rates.launch, arithmetic, work.moved_bytes / rates.bytes)


def mask_seconds(value: torch.Tensor, rates: Rates) -> float:
    """Of keeping the mask of a dropout of `value` as one byte an element: made so, and expanded for the backward."""
    return value.numel() * (2 + 4 * value.itemsize) / rates.bytes


def masked_seconds(value: torch.Tensor, rates: Rates) -> float:
    """Of running such a dropout again from its kept mask: the mask is expanded, and multiplied by."""
    return value.numel() * (1 + 6 * value.itemsize) / rates.bytes


class Efforts(Tally):
    """Counts operators and random numbers, to be taken node by node."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn = 0
        self._random: dict[Any, bool] = {}

    def count(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, phase: str
    ) -> None:
        """Add one call; a written tensor counts as read too."""
        super().count(func, args, kwargs, out, phase)
        random = self._random.get(func)
        if random is None:
            random = self._random[func] = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if random:
            self._drawn += _elements(out if isinstance(out, (tuple, list)) else (out,))

    def take(self) -> Effort:
        """What was counted since the last time."""
        effort = Effort(self.work(), self._drawn)
        self.restart()
        self._drawn = 0
        return effort


def _elements(results: Iterable[Any]) -> int:
    return next((result.numel() for result in results if isinstance(result, torch.Tensor)), 0)
