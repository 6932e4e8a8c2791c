"""What each node of each module instance keeps for the backward, from the records of an estimate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rewrite.memory.timeline import Estimate, SavedAt
from rewrite.program import Program, Region


@dataclass(frozen=True)
class Kept:
    """What one node keeps in one instance: bytes, and the shape and dtype of the largest of it."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str


KeptByInstance = Mapping[str, Mapping[str, Kept]]
"""Instance path, then node name; a node of no graph is named by its module path below the instance and operator."""


def serving(program: Program) -> Mapping[str, Region]:
    """The region that each instance runs in the captured call.

    A block may have several regions, such as one for inputs that need a gradient and one for inputs that do not; each
    lists every instance it could serve, and the capture knows which ones it did serve.
    """
    found: dict[str, Region] = {}
    for region in program.regions:
        for path in region.instances:
            if path not in found or (_ran(region, path) and not _ran(found[path], path)):
                found[path] = region
    return found


def _ran(region: Region, path: str) -> bool:
    return path in getattr(region.captured, "instances", (region.path,))


def kept_by_instance(program: Program, estimate: Estimate) -> KeptByInstance:
    """The saved bytes of `estimate`, each under the instance of `program` whose graph, or module, made them."""
    regions = serving(program)
    names = {id(region): frozenset(node.name for node in region.graph.nodes) for region in program.regions}
    found: dict[str, dict[str, list[SavedAt]]] = {}
    for saved in estimate.saved:
        owner = owner_of(saved.module_path, regions)
        nodes = names[id(regions[owner])] if owner in regions else frozenset()
        found.setdefault(owner, {}).setdefault(_node_name(saved, owner, nodes), []).append(saved)
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
