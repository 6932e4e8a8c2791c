"""Frozen modules that are to run in eval mode: those of the frozen part, and frozen batch norms anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.modules.batchnorm import _NormBase

from passes.frozen_part import FrozenPart
from passes.nodes import path_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import Node

    from rewrite import Program, Region


def held_modules(program: Program) -> Iterator[tuple[Region, dict[str, list[Node]]]]:
    """For each region, the path of each outermost such module, as its first instance has it -> the nodes it runs."""
    for region in program.regions:
        found = _wholly_frozen(program, region)
        for node in region.nodes():
            if _is_frozen_norm(region, node):
                path = path_in(node, region, region.path)
                if not any(path == other or path.startswith(f"{other}.") for other in found):
                    found[path] = [node]
        yield region, found


def _wholly_frozen(program: Program, region: Region) -> dict[str, list[Node]]:
    """Outermost modules all of whose nodes are frozen, with a weight among them or before them."""
    part = FrozenPart(program, region, in_order=False)
    if not part.reads_weights():
        return {}
    calls = [node for node in region.nodes() if node.op.startswith("call")]
    runs: dict[str, list[Node]] = {}
    for node in calls:
        for path in _at_and_above(path_in(node, region, region.path), region.path):
            runs.setdefault(path, []).append(node)
    whole = {path: nodes for path, nodes in runs.items() if path and all(node in part.clean for node in nodes)}
    return {path: nodes for path, nodes in whole.items() if not any(path.startswith(f"{other}.") for other in whole)}


def _at_and_above(path: str, top: str) -> Iterator[str]:
    while len(path) >= len(top):
        yield path
        if path == top or not path:
            return
        path = path.rpartition(".")[0]


def _is_frozen_norm(region: Region, node: Node) -> bool:
    """Whether the node calls a batch norm, or another with running statistics, whose own weights are all frozen."""
    if node.op != "call_module":
        return False
    layer = region.called(node)
    weights = list(layer.parameters())
    return isinstance(layer, _NormBase) and bool(weights) and not any(weight.requires_grad for weight in weights)
