"""Private torch names that tie a backward operator to the forward operator it belongs to."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class Holders(NamedTuple):
    """How many references there are to a tensor and to its storage."""

    tensor: int
    storage: int


def holders(tensor: torch.Tensor) -> Holders:
    """Reference counts of a tensor and of its storage, as seen from within a dispatch mode."""
    storage = tensor.untyped_storage()._cdata
    return Holders(tensor._use_count(), torch._C._storage_Use_Count(storage))  # type: ignore[attr-defined]


@functools.cache
def lone_holders() -> Holders:
    """What `holders` answers for a gradient that only the engine's input buffer holds.

    Found by making the engine add up two such gradients, once.
    """
    seen: list[Holders] = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor and running_sequence_number() is not None:
                seen.append(holders(args[0]))
            return func(*args, **(kwargs or {}))

    leaf = torch.ones(1, requires_grad=True)
    with torch.enable_grad():
        twice = leaf * 2
        total = twice * 3 + twice * 4
    with Look():  # type: ignore[no-untyped-call]
        total.backward()
    return seen[0]


def routes_twice() -> bool:
    """Whether the autograd node that runs now hands two gradients to the same place."""
    following = [edge for edge in torch._C._current_autograd_node().next_functions if edge[0] is not None]
    return len(set(following)) < len(following)
