"""Frozen modules that run after something trained, and what would get no gradient if gradients ended there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from passes.frozen_part import needs_grad, trains
from passes.nodes import path_in

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch.fx import Node

    from rewrite import Program, Region


def frozen_places(region: Region) -> dict[str, list[Node]]:
    """Path of each frozen module that gradients go through -> its nodes: a block, or the outermost outside of blocks.

    Frozen layers inside a block that is trained elsewhere (the base layers of LoRA) are part of that block.
    """
    model = region.captured.module
    found: dict[str, list[Node]] = {}
    whole = region.path and _is_frozen(model)
    for node in region.nodes():
        if not node.op.startswith("call"):
            continue
        place = region.path if whole else None if region.path else _outermost(model, path_in(node, region, ""))
        if place is not None:
            found.setdefault(place, []).append(node)
    return {place: nodes for place, nodes in found.items() if any(map(needs_grad, nodes))}


def _outermost(model: object, path: str) -> str | None:
    """The outermost frozen module at or above `path`."""
    parts = path.split(".") if path else []
    above = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return next((place for place in above if _is_frozen(model.get_submodule(place))), None)  # type: ignore[attr-defined]


def _is_frozen(module: object) -> bool:
    weights = list(module.parameters())  # type: ignore[attr-defined]
    return bool(weights) and not any(weight.requires_grad for weight in weights)


def first_trained(program: Program) -> str:
    """Path of the first module, in the order in which they run, that is trained."""
    for region in program.regions:
        for node in region.nodes():
            if trains(region, node):
                return path_in(node, region, region.path)
    return ""


def untrained_by(region: Region, cut: Collection[Node]) -> tuple[list[str], bool]:
    """Paths of the trained modules that no gradient reaches when it ends at `cut`, and whether any are left.

    `region` is the root's, or the one captured.
    """
    reached: set[Node] = set()
    for node in reversed(list(region.nodes())):
        if node not in cut and (node.op == "output" or any(user in reached for user in node.users)):
            reached.add(node)
    trained = [node for node in region.nodes() if node.op.startswith("call") and trains(region, node)]
    lost = [path_in(node, region, region.path) for node in trained if node not in reached]
    return list(dict.fromkeys(lost)), any(node in reached for node in trained)
