"""How large a batch, or a sequence, fits a memory: as the model is, and with the passes that a budget chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rewrite.errors import BudgetError
from rewrite.plan.joint import Joint
from rewrite.plan.largest import MOST, largest
from rewrite.report.sizes import parse_bytes

FIRST, LAST = 0, -1
"""Which offer of each pass a size is tried with: the first takes the least time to plan, the last reaches lowest."""

JointAt = Callable[[int, int | None], Joint]
"""What there is to choose from for a size, with the offers at one place alone or, for None, with all."""


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


def fit_sizes(joint_at: JointAt, memory: str | int, *, step: int = 1, most: int = MOST) -> Fit:
    """The largest multiples of `step` up to `most` that fit; `joint_at` makes what there is to choose from for a size.

    Raises InputError for a memory that is no number of bytes, and whatever `joint_at` raises.
    """
    sizes = _Sizes(joint_at)
    memory_bytes = memory if isinstance(memory, int) else parse_bytes(memory)
    plain = planned = largest(sizes.untouched_bytes, memory_bytes, step=step, most=most)
    if plain + step <= most:
        about = largest(partial(sizes.lowest_bytes, FIRST), memory_bytes, step=step, most=most, near=plain)
        exact = largest(partial(sizes.lowest_bytes, LAST), memory_bytes, step=step, most=most, near=about)
        planned = max(plain, about, exact)
    peak_bytes = sizes.untouched_bytes(plain) if plain else 0
    while planned > plain:
        try:
            plan = joint_at(planned, None).plan(memory)
        except BudgetError:  # the simulation had let it through
            planned -= step
            continue
        return Fit(memory_bytes, plain, planned, plan.spec, peak_bytes, plan.after.peak_bytes, plan.time_ratio)
    return Fit(memory_bytes, plain, plain, "", peak_bytes, peak_bytes, 1.0)


class _Sizes:
    """Peaks by size, each found once."""

    def __init__(self, joint_at: JointAt) -> None:
        self.joint_at = joint_at
        self.untouched: dict[int, int] = {}
        self.lowest: dict[tuple[int, int], int] = {}

    def untouched_bytes(self, size: int) -> int:
        if size not in self.untouched:
            self.untouched[size] = self.joint_at(size, FIRST).base.before.peak_bytes
        return self.untouched[size]

    def lowest_bytes(self, only: int, size: int) -> int:
        if (only, size) not in self.lowest:
            joint = self.joint_at(size, only)
            self.untouched[size] = joint.base.before.peak_bytes
            self.lowest[only, size] = min(joint.base.before.peak_bytes, joint.lowest_bytes)
        return self.lowest[only, size]
