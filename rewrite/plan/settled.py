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
from rewrite.plan.outline import Piece
from rewrite.program import Program
from rewrite.text import program_text


class Spot(NamedTuple):
    """Where a piece stands in a program, without what it is made of."""

    region: int
    instance: str
    names: tuple[str, ...]
    once: frozenset[str]


def spot_of(piece: Piece) -> Spot:
    """Where a piece stands."""
    return Spot(piece.region, piece.instance, piece.names, piece.once)


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
    """Equal for calls of one model with equal graphs and sizes, whatever its classes are called: FSDP2 renames them."""
    regions = tuple(replace(region, class_name="") for region in program.regions)
    leaves = torch.utils._pytree.tree_leaves((args, kwargs or {}))
    return program_text(replace(program, regions=regions, root_class="")), tuple(_kind(leaf) for leaf in leaves)


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.requires_grad
    if isinstance(leaf, (bool, int, float, str, type(None))):
        return leaf
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"
