"""Plans that were made for a model's call, to be used again when an equal call is captured again.

A model is captured anew when what surrounds it changes: it was wrapped or sharded since, or has hooks. As long as its
graphs and the sizes of the call are the same, so is the plan.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from rewrite.memory.timeline import Estimate
from rewrite.plan.curve import Point
from rewrite.plan.outline import Call, Piece
from rewrite.program import Program
from rewrite.text import program_text


class Spot(NamedTuple):
    """Where a piece stands in a program, without what it is made of."""

    region: int
    instance: str
    names: tuple[str, ...]
    once: frozenset[str]
    call: Call | None = None
    computes: bool = True
    """Whether it makes any value, rather than views."""

    @property
    def around(self) -> tuple[int, tuple[str, ...]]:
        """For a block the number of the region that calls it, and the node there; for any other piece its own."""
        return (self.region, self.names) if self.call is None else (self.call.region, (self.call.name,))


def spot_of(piece: Piece) -> Spot:
    """Where a piece stands."""
    return Spot(piece.region, piece.instance, piece.names, piece.once, piece.call, piece.computes)


@dataclass(frozen=True)
class Settled:
    """A plan without its program."""

    spots: tuple[Spot, ...]
    points: tuple[Point | None, ...]
    before: Estimate
    after: Estimate
    seconds: float
    rung: int


def call_key(program: Program, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Hashable:
    """Equal for calls of one model with equal graphs, sizes and hooks on layers, which must fire once.

    What its classes are called, and hooks on its blocks, which run around a plan, make no difference: FSDP2 changes
    both.
    """
    regions = tuple(replace(region, class_name="") for region in program.regions)
    leaves = torch.utils._pytree.tree_leaves((args, kwargs or {}))
    hooked = tuple(
        (number, node.name)
        for number, region in enumerate(regions)
        for node in region.nodes()
        if node.meta.get("hooked") and not node.meta.get("block")
    )
    return program_text(replace(program, regions=regions, root_class="")), hooked, tuple(map(_kind, leaves))


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    if isinstance(leaf, (bool, int, float, str, type(None))):
        return leaf
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"
