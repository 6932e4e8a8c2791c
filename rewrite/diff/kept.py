"""What each node of each module instance keeps for the backward, from the records of an estimate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rewrite.memory.timeline import Estimate, SavedAt
from rewrite.program import Program


@dataclass(frozen=True)
class Kept:
    """What one node keeps in one instance: bytes, and the shape and dtype of the largest of it."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str


KeptByInstance = Mapping[str, Mapping[str, Kept]]
"""Instance path, then node name; a node of no graph is named by its module path below the instance and operator."""


def kept_by_instance(program: Program, estimate: Estimate) -> KeptByInstance:
    """The saved bytes of `estimate`, each under the instance of `program` whose graph, or module, made them."""
    owners = {path for region in program.regions for path in region.instances}
    nodes = {
        path: frozenset(node.name for node in region.graph.nodes)
        for region in program.regions
        for path in region.instances
    }
    found: dict[str, dict[str, list[SavedAt]]] = {}
    for saved in estimate.saved:
        owner = owner_of(saved.module_path, owners)
        found.setdefault(owner, {}).setdefault(_node_name(saved, owner, nodes.get(owner, frozenset())), []).append(
            saved
        )
    return {owner: {name: _merged(parts) for name, parts in by_node.items()} for owner, by_node in found.items()}


def owner_of(module_path: str, owners: Iterable[str]) -> str:
    """The innermost of the instance paths `owners` that holds `module_path`."""
    path = module_path
    while path and path not in owners:
        path = path.rpartition(".")[0]
    return path


def _node_name(saved: SavedAt, owner: str, nodes: frozenset[str]) -> str:
    if saved.node in nodes:
        return saved.node
    below = saved.module_path[len(owner) :].lstrip(".")
    return f"{below}:{saved.node}" if below else saved.node


def _merged(parts: list[SavedAt]) -> Kept:
    largest = max(parts, key=lambda part: part.bytes)
    return Kept(sum(part.bytes for part in parts), tuple(largest.shape), largest.dtype)
