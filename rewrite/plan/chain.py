"""The peak of a step whose pieces keep this or that, simulated at every position, and the best choice within a bound.

While piece `i` runs backward there is alive: what is there all the time; the gradients of the parameters of later
pieces; what earlier pieces keep; the values that pass between pieces and are still held; their gradients; and what the
piece itself holds, at its worst moment. The least recompute under a bound on all of these is found by dynamic
programming over the pieces, from the first to the last, on (bytes kept so far, seconds so far).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy

from rewrite.plan.measure import Footprint

MOST_STATES = 4096
"""States carried from piece to piece; of more than these an even choice is carried, by kept bytes."""
MOST_TIED = 64
"""Joint choices tried for blocks that run several times; beyond that, all take the same place of their curves."""


LOOSE = 256
"""Bytes that may be counted too much are neglected up to one part in 256 of the untouched peak."""


@dataclass(frozen=True)
class Value:
    """A storage that passes between pieces."""

    bytes: int
    grad_bytes: int
    maker: int | None
    """Number of the piece that makes it; None for an input of the model, which is alive all the time."""
    readers: tuple[int, ...]
    last_grad_bytes: int = 0
    """Of the storage behind the gradient that the last reader gives, which is larger than the gradient where that is a
    part of it, as that of a concatenation is. It is held until the reader before gives its own."""


@dataclass(frozen=True)
class Link:
    """One piece in the chain."""

    options: tuple[Footprint, ...]
    """What it can keep; the first is to run as it is."""
    inputs: tuple[int, ...] = ()
    """The values it reads and makes, by number, in the order of `holds_inputs` and `holds_results`."""
    outputs: tuple[int, ...] = ()
    tied: str | None = None
    """Equal for pieces that must take the same option: runs of one block."""


@dataclass(frozen=True)
class Simulation:
    """A choice of option for each piece, and the peak of the step."""

    choice: tuple[int, ...]
    peak_bytes: int
    seconds: float
    at: int
    """Number of the piece that runs at the peak; -1 when it is reached outside every piece."""
    phase: str


@dataclass(frozen=True)
class Chain:
    """The pieces of a step in the order of its forward, and what is alive beside them."""

    links: tuple[Link, ...]
    values: tuple[Value, ...] = ()
    constant_bytes: int = 0
    """Parameters, buffers, inputs and optimizer state."""
    least_bytes: int = 0
    """The peak of what no choice changes, such as the optimizer's step."""
    gradient_bytes: tuple[int, ...] = ()
    """For each piece the parameter gradients that the pieces after it have left."""
    _bases: list[tuple[list[int], list[int]]] = field(default_factory=list, compare=False, repr=False)

    def simulate(self, choice: Sequence[int]) -> Simulation:
        """The peak with this option for each piece."""
        forward, backward = self._levels(choice)
        taken = [link.options[option] for link, option in zip(self.links, choice, strict=True)]
        highest, at, phase, kept = self.least_bytes, -1, "optimizer", 0
        for number, option in enumerate(taken):
            for level, within, name in (
                (forward[number], option.forward, "forward"),
                (backward[number], option.backward, "backward"),
            ):
                if level + kept + within > highest:
                    highest, at, phase = level + kept + within, number, name
            kept += option.kept
        return Simulation(tuple(choice), highest, sum(option.seconds for option in taken), at, phase)

    def _levels(self, choice: Sequence[int] | None) -> tuple[list[int], list[int]]:
        """What is alive while each piece runs, forward and backward, beside what pieces keep and hold for themselves.

        Without a choice, a value counts as held by every piece that holds it under any option.
        """
        count = len(self.links)
        forward, backward = [self.constant_bytes] * count, [self.constant_bytes] * count
        for number, left in enumerate(self.gradient_bytes):
            backward[number] += left
        for place, value in enumerate(self.values):
            if value.maker is None:
                continue
            last = max(value.readers, default=value.maker)
            holders = [number for number in (value.maker, *value.readers) if self._holds(number, place, choice)]
            for number in range(value.maker, last + 1 if not holders else count):
                forward[number] += value.bytes
            for number in range(value.maker + 1, count) if holders else ():
                if number >= min(holders):
                    backward[number] += value.bytes
            part_of = max(value.last_grad_bytes - value.grad_bytes, 0)
            before_last = max((reader for reader in value.readers if reader < last), default=value.maker + 1)
            for number in range(value.maker + 1, last):
                backward[number] += value.grad_bytes + (part_of if number >= before_last else 0)
        return forward, backward

    def _holds(self, number: int, place: int, choice: Sequence[int] | None) -> bool:
        link = self.links[number]
        options = link.options if choice is None else (link.options[choice[number]],)
        for option in options:
            held = itertools.chain(
                zip(link.inputs, option.holds_inputs, strict=False),
                zip(link.outputs, option.holds_results, strict=False),
            )
            if any(each == place and holds for each, holds in held):
                return True
        return False

    def best(self, budget_bytes: int) -> Simulation | None:
        """The choice with the least recompute whose simulated peak is at most the budget; None when there is none."""
        if self.least_bytes > budget_bytes:
            return None
        untouched = self.simulate([0] * len(self.links))
        if untouched.peak_bytes <= budget_bytes and not self._gains:
            return untouched
        found = [
            each
            for group in self._groups()
            for fixed in self._ties()
            if (each := self._best(budget_bytes, fixed, group)) is not None
        ]
        return min(found, key=lambda each: (each.seconds, each.peak_bytes), default=None)

    @property
    def _gains(self) -> bool:
        """Whether a piece has an option that is faster than its first."""
        return any(option.seconds < link.options[0].seconds for link in self.links for option in link.options)

    def _ties(self) -> list[dict[str, int]]:
        """The joint choices for pieces that must take the same option."""
        widths: dict[str, int] = {}
        for link in self.links:
            if link.tied is not None:
                widths[link.tied] = len(link.options)
        joint = numpy.prod([float(width) for width in widths.values()]) if widths else 1.0
        if joint <= MOST_TIED:
            spans = itertools.product(*[range(width) for width in widths.values()])
            return [dict(zip(widths, chosen, strict=True)) for chosen in spans]
        return [{name: min(step, width - 1) for name, width in widths.items()} for step in range(max(widths.values()))]

    @functools.cached_property
    def is_loose(self) -> bool:
        """Whether `best` may count values as held that a choice does not hold, of so many bytes that it matters."""
        differing = set[int]()
        for link in self.links:
            held = [
                {value for value, holds in zip(link.inputs, option.holds_inputs, strict=False) if holds}
                | {value for value, holds in zip(link.outputs, option.holds_results, strict=False) if holds}
                for option in link.options
            ]
            differing |= set[int]().union(*held) - held[0].intersection(*held)
        off_bytes = sum(self.values[value].bytes for value in differing)
        return off_bytes * LOOSE > self.simulate([0] * len(self.links)).peak_bytes

    def _groups(self) -> list[tuple[int, str] | None]:
        """The ways to group blocks that options are for."""
        found = {option.group for link in self.links for option in link.options if option.group}
        return [*sorted(found)] or [None]

    def _best(self, budget_bytes: int, fixed: dict[str, int], group: tuple[int, str] | None) -> Simulation | None:
        if not self._bases:
            self._bases.append(self._levels(None))
        forward, backward = self._bases[0]
        kept, seconds = numpy.zeros(1), numpy.zeros(1)
        steps: list[tuple[numpy.ndarray, numpy.ndarray]] = []
        for number, link in enumerate(self.links):
            room = (budget_bytes - forward[number], budget_bytes - backward[number])
            fitting = [option for option, each in enumerate(link.options) if each.group in (None, group)]
            allowed = [fixed[link.tied]] if link.tied in fixed else fitting
            parts = []
            for option in allowed:
                footprint = link.options[option]
                limit = min(room[0] - footprint.forward, room[1] - footprint.backward)
                fits = numpy.flatnonzero(kept <= limit)
                parts.append((kept[fits] + footprint.kept, seconds[fits] + footprint.seconds, fits, option))
            states = _merged(parts)
            if states is None:
                return None
            kept, seconds, before, chosen = states
            steps.append((before, chosen))
        place = int(numpy.argmin(seconds))
        choice: list[int] = []
        for before, chosen in reversed(steps):
            choice.append(int(chosen[place]))
            place = int(before[place])
        return self.simulate(choice[::-1])

    def lowest(self) -> Simulation:
        """The choice with the lowest peak, and of those the one with the least recompute."""
        low, high = self.least_bytes - 1, self.simulate([0] * len(self.links)).peak_bytes
        best = self.best(high) or self.simulate([0] * len(self.links))
        while low + 1 < high:
            middle = (low + high) // 2
            found = self.best(middle)
            if found is None:
                low = middle
            else:
                best, high = found, min(middle, found.peak_bytes)
        return best


def _merged(
    parts: Sequence[tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray, int]],
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray, numpy.ndarray] | None:
    """The states of which no other keeps less for less; None when there are none."""
    kept = numpy.concatenate([part[0] for part in parts])
    if not kept.size:
        return None
    seconds = numpy.concatenate([part[1] for part in parts])
    before = numpy.concatenate([part[2] for part in parts])
    chosen = numpy.concatenate([numpy.full(part[0].size, part[3]) for part in parts])
    order = numpy.lexsort((seconds, kept))
    lowest = numpy.minimum.accumulate(seconds[order])
    better = numpy.concatenate([[True], lowest[1:] < lowest[:-1] * (1 - 1e-12)])
    order = order[better]
    if order.size > MOST_STATES:
        order = order[numpy.linspace(0, order.size - 1, MOST_STATES).astype(int)]
    return kept[order], seconds[order], before[order], chosen[order]
