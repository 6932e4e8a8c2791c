"""How large a batch, or a sequence, fits a memory: as the model is, and with the passes that a budget chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rewrite.errors import BudgetError
from rewrite.plan.joint import Joint
from rewrite.plan.largest import MOST, largest
from rewrite.report.sizes import parse_bytes


@dataclass(frozen=True)
class Fit:
    """The largest sizes for one memory, 0 where not even the smallest fits."""

    memory_bytes: int
    plain: int
    """With no passes."""
    planned: int
    """With the best plan."""
    spec: str
    """The plan for `planned`, as text; "" when the model fits as it is, or nothing fits."""
    plain_peak_bytes: int
    """Peak of a step of `plain`; 0 for none."""
    planned_peak_bytes: int
    time_ratio: float
    """Predicted time of the planned step, of that of the untouched one of equal size."""


def fit_sizes(joint_at: Callable[[int], Joint], memory: str | int, *, step: int = 1, most: int = MOST) -> Fit:
    """The largest multiples of `step` up to `most` that fit; `joint_at` makes what there is to choose from for a size.

    Raises InputError for a memory that is no number of bytes, and whatever `joint_at` raises.
    """
    sizes = _Sizes(joint_at)
    memory_bytes = memory if isinstance(memory, int) else parse_bytes(memory)
    plain = planned = largest(sizes.untouched_bytes, memory_bytes, step=step, most=most)
    if plain + step <= most:
        planned = max(plain, largest(sizes.lowest_bytes, memory_bytes, step=step, most=most))
    peak_bytes = sizes.untouched_bytes(plain) if plain else 0
    while planned > plain:
        try:
            plan = sizes.joint(planned).plan(memory)
        except BudgetError:  # the simulation had let it through
            planned -= step
            continue
        return Fit(memory_bytes, plain, planned, plan.spec, peak_bytes, plan.after.peak_bytes, plan.time_ratio)
    return Fit(memory_bytes, plain, plain, "", peak_bytes, peak_bytes, 1.0)


class _Sizes:
    """What there is to choose from at one size after another; the last is held, for each holds a model's graphs."""

    def __init__(self, joint_at: Callable[[int], Joint]) -> None:
        self.joint_at = joint_at
        self.held: tuple[int, Joint] | None = None
        self.untouched: dict[int, int] = {}

    def joint(self, size: int) -> Joint:
        if self.held is None or self.held[0] != size:
            self.held = None
            self.held = size, self.joint_at(size)
        return self.held[1]

    def untouched_bytes(self, size: int) -> int:
        if size not in self.untouched:
            self.untouched[size] = self.joint(size).base.before.peak_bytes
        return self.untouched[size]

    def lowest_bytes(self, size: int) -> int:
        return min(self.untouched_bytes(size), self.joint(size).lowest_bytes)
