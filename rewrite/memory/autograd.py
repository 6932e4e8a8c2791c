"""Private torch names that tie a backward operator to the forward operator it belongs to."""

from __future__ import annotations

import torch

_NO_NUMBER = 2**64 - 1
"""What a node that accumulates a gradient answers: it has no place in the order."""


def newest_sequence_number() -> int:
    """The number of the autograd node made last on this thread; below zero before the first."""
    return torch._C._autograd._get_sequence_nr() - 1


def running_sequence_number() -> int | None:
    """The number of the autograd node whose backward runs now; None outside a backward, or where it has none."""
    node = torch._C._current_autograd_node()
    if node is None:
        return None
    number: int = node._sequence_nr()
    return None if number == _NO_NUMBER else number
