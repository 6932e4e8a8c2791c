"""Who calls a region, and what its inputs are there."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from passes.nodes import called_path

if TYPE_CHECKING:
    from rewrite import Program, Region


@dataclass(frozen=True)
class Call:
    """One node that calls a block."""

    region: Region
    """The one around, with the node in its graph."""
    node: Node
    given: Mapping[Node, Node]
    """Placeholder of the region called -> the node that is given there."""


class Callers:
    """The calls of every region of a program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.blocks = [
            (region, node, _called(region, node))
            for region in program.regions
            for node in region.nodes()
            if node.op == "call_module" and node.meta.get("block")
        ]

    def of(self, region: Region) -> list[Call]:
        """The calls of a region; none where one of its instances is called by nothing here, or in a way unknown."""
        around = [(parent, node) for parent, node, paths in self.blocks if paths & set(region.instances)]
        reached = {path for _, _, paths in self.blocks for path in paths}
        given = [_given(region, node) for _, node in around]
        if not set(region.instances) <= reached or not all(given):
            return []
        return [Call(parent, node, each) for (parent, node), each in zip(around, given, strict=True)]

    def within(self, region: Region, node: Node) -> list[Region]:
        """The regions that a call of a block runs, over all instances of `region`; none where one has no graph."""
        paths = _called(region, node)
        found = [each for each in self.program.regions if paths & set(each.instances)]
        return found if paths <= {path for each in found for path in each.instances} else []


def _called(region: Region, node: Node) -> set[str]:
    """Paths of what a node calls, over all instances of its region."""
    below = called_path(region, node)[len(region.path) :].lstrip(".")
    return {f"{instance}.{below}".lstrip(".") for instance in region.instances}


def _given(region: Region, node: Node) -> dict[Node, Node]:
    """What each placeholder of a region is at a call; empty where that cannot be told."""
    placeholders = [each for each in region.nodes() if each.op == "placeholder"]
    given = list(_named_arguments(region, node))
    if len(given) != len(placeholders):
        return {}
    fits = (str(each.target) == name or str(each.target).startswith(f"{name}_") for each, (name, _) in
            zip(placeholders, given, strict=True))  # fmt: skip
    return dict(zip(placeholders, (value for _, value in given), strict=True)) if all(fits) else {}


def _named_arguments(region: Region, node: Node) -> Iterator[tuple[str, Node]]:
    """The nodes among the arguments of a call, in the order of the forward's parameters, with their names."""
    try:
        bound = inspect.signature(region.captured.module.forward).bind(*node.args, **node.kwargs)
    except TypeError:
        return
    for name, value in bound.arguments.items():
        leaves: list[Any] = torch.utils._pytree.tree_leaves(value)
        yield from ((name, leaf) for leaf in leaves if isinstance(leaf, Node))
