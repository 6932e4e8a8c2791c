"""The program: what capture makes, passes tag, emission runs and the diff reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from rewrite.tags import ORIGIN as ORIGIN
from rewrite.tags import RECOMPUTE as RECOMPUTE
from rewrite.tags import TAGS as TAGS


@dataclass(frozen=True)
class Opaque:
    """A module whose forward runs as its author wrote it, because a graph cannot stand for it."""

    path: str
    """Module path; "" for the root."""
    reason: str
    source: str = ""
    """Where the cause stands in the user's code, as `file.py:12`."""


@dataclass(frozen=True)
class Region:
    """One graph and the module instances it serves.

    Nodes carry `meta["val"]` (fake value), `meta["module_path"]` (absolute path, of the first instance, of the
    module whose forward made the node) and `meta["source"]` (the user's line, `file.py:12`).
    """

    path: str
    """Module path of the first instance; "" for the root."""
    instances: tuple[str, ...]
    """Every module path that runs this graph; a shared module is listed once."""
    class_name: str
    graph: fx.Graph
    random: bool = True
    """Whether the forward draws random numbers."""
    written_buffers: tuple[str, ...] = ()
    """Buffers, by path below the region's module, that the forward writes in place."""
    mutated_inputs: tuple[str, ...] = ()
    """Placeholders whose tensor the forward changes in place."""
    captured: Any = None
    """What emission needs of the capture; passes leave it alone."""

    def nodes(self) -> Iterator[fx.Node]:
        return iter(self.graph.nodes)

    def called(self, node: fx.Node) -> nn.Module:
        """The module that a `call_module` node calls, of the first instance; it is not to be run or changed."""
        return self.captured.module.get_submodule(str(node.target))  # type: ignore[no-any-return]

    def segments(self) -> Mapping[int, tuple[fx.Node, ...]]:
        """The recompute segments, each in graph order."""
        found: dict[int, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if RECOMPUTE in node.meta:
                found.setdefault(node.meta[RECOMPUTE], []).append(node)
        return {number: tuple(nodes) for number, nodes in found.items()}


@dataclass(frozen=True)
class Program:
    """A captured model: its regions (root first, a parent before its children) and what stayed opaque."""

    regions: tuple[Region, ...]
    opaque: tuple[Opaque, ...] = ()
    root_class: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """`blocks`: paths of the repeated blocks. `first`: whether this is the whole model, captured for the first time,
    rather than what a later kind of call runs of it. `grad`: whether autograd records the call."""

    def region(self, path: str) -> Region:
        """The region that serves the module at `path`; raises KeyError."""
        for region in self.regions:
            if path in region.instances:
                return region
        raise KeyError(path)

    def left_of(self, region: Region) -> Region:
        """What splits have left of a region: the one with its graph; raises KeyError.

        Two regions may serve one instance that is called in two ways, so that its path does not tell them apart.
        """
        for each in self.regions:
            if each.graph is region.graph:
                return each
        raise KeyError(region.path)

    def copy(self) -> Program:
        """The same program with graphs of its own: tags set on the copy do not reach the original."""
        return replace(self, regions=tuple(replace(region, graph=copy_graph(region.graph)) for region in self.regions))

    def split(self, region: Region, instances: tuple[str, ...]) -> tuple[Program, Region]:
        """Give `instances` of `region` a graph of their own, so that they can be tagged apart from the others."""
        if set(instances) == set(region.instances):
            return self, region
        rest = tuple(path for path in region.instances if path not in set(instances))
        taken = replace(region, path=instances[0], instances=instances, graph=copy_graph(region.graph))
        left = replace(region, path=rest[0], instances=rest)
        position = self.regions.index(region)
        regions = (*self.regions[:position], taken, left, *self.regions[position + 1 :])
        return replace(self, regions=regions), taken


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy with the same node names, in the same order, whose `meta` dicts are its own."""
    copied = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        made[node] = copied.create_node(
            node.op,
            node.target,
            fx.map_arg(node.args, made.__getitem__),
            fx.map_arg(node.kwargs, made.__getitem__),
            node.name,
            node.type,
        )
        made[node].meta = dict(node.meta)
    return copied


def value_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors inside a node's fake value, in order."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
