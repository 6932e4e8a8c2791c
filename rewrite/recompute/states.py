"""Which of what an operator saves for itself, beside its inputs and its result, stays saved whatever is kept."""

from __future__ import annotations

from collections.abc import Collection

SMALL = 16
"""A tensor stays that takes at most one part in 16 of the result's bytes: statistics of a norm, sums of attention."""
ALL = 4
"""Unless all that would stay take more than one part in 4: a recurrence saves a little at each of many steps."""


def limit_bytes(sizes: Collection[int], result_bytes: int) -> int:
    """The most that a tensor may take to stay, of an operator that saves tensors of `sizes` bytes; -1 if none does."""
    limit = result_bytes // SMALL
    small = sum(size for size in sizes if size <= limit)
    return limit if small <= result_bytes // ALL else -1
