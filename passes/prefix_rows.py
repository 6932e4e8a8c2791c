"""Whether what a function gives for an example depends on that example alone: rows among others are looked at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far a row may be from itself in another batch, in parts of its largest number; for wider types 1e-4."""


def rows_are_independent(
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[Any],
    by_row: Sequence[bool],
    made: Sequence[torch.Tensor],
) -> bool:
    """Whether each row of `made`, which `function` gave for `inputs`, comes out the same in two other batches.

    Each of them has half of the rows in an order without a pattern, and one of these again: a row meets other rows,
    fewer of them, at another place. Inputs that are not `by_row` stay. False for a function that takes no such batch.
    """
    rows = made[0].shape[0]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).tolist()
    half = (rows + 1) // 2
    for part in filter(None, (order[:half], order[half:])):
        copies = 2 if len(part) + 1 == rows else 1  # another size than before, and not 1, which may be made apart
        places = [*part, *part[:1] * copies]
        batch = [each[places] if row else each for each, row in zip(inputs, by_row, strict=True)]
        try:
            again = function(*batch)
        except (RuntimeError, ValueError, IndexError):  # rows in groups of a fixed size
            return False
        if not all(_close(one, other[places]) for one, other in zip(again, made, strict=True)):
            return False
    return True


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two batches hold the same rows."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    if one.shape != other.shape:
        return False
    largest, gap = (each.abs().flatten(1).amax(1) for each in (other.float(), one.float() - other.float()))
    return bool((gap <= TOLERANCE.get(one.dtype, 1e-4) * largest).all())
