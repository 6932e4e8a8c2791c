"""Which frozen values are kept for a recompute, rather than computed again in it.

What a recomputed part needs of the frozen nodes before it is either held from the forward on or made again. Matrix work
and random numbers are never repeated; of the cheap nodes after them those run again that need less held than they give
(a mask widened to every head, ids looked up, a cast). That is a minimum cut of the frozen nodes' graph with the bytes
of values as capacities (a closure with prices: Picard 1976, "Maximal Closure of a Graph and Applications").
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from passes.costly import is_costly
from passes.nodes import ROUTING, function_name, hint, mode_change, storages, tensors_of
from rewrite import DETACH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import Node

    from rewrite import Region

_HELD, _GONE = "held", "gone"


def kept_frozen(region: Region) -> frozenset[Node]:
    """The detached nodes of `region` that run once; with each, all the detached nodes it depends on."""
    frozen = [node for node in region.nodes() if DETACH in node.meta]
    if not frozen:
        return frozenset()
    import networkx

    once = set(_runs_once(region))
    inside = set(frozen)
    graph = networkx.DiGraph()  # an edge without a capacity is never cut
    graph.add_nodes_from((_HELD, _GONE))
    for node in frozen:
        graph.add_edge(_HELD, node, **({} if node in once else {"capacity": 1}))  # of equal bytes, keep the later
        graph.add_edge(node, (_HELD, node), capacity=_held_bytes(node))
        for source in node.all_input_nodes:
            if source in inside:
                graph.add_edge(node, source)
                graph.add_edge((_HELD, source), node)
            elif source.op == "placeholder":
                free = any(user not in inside for user in source.users)
                graph.add_edge(_HELD, (_HELD, source), capacity=0 if free else _held_bytes(source))
                graph.add_edge((_HELD, source), node)
        if any(user not in inside for user in node.users):
            graph.add_edge((_HELD, node), _GONE)
    _, (held, _) = networkx.minimum_cut(graph, _HELD, _GONE)
    return frozenset(inside & held)


def _runs_once(region: Region) -> Iterator[Node]:
    """Nodes that are dear, might come out differently, or must keep their place among others."""
    names = {name for node in region.nodes() for name in node.meta.get("writes", ())}
    written = storages(node for node in region.nodes() if node.name in names)
    depth = 0
    for node in region.nodes():
        depth += mode_change(node)
        moves = depth > 0 or mode_change(node) != 0 or bool(written & storages((node, *node.all_input_nodes)))
        if moves or node.meta.get("random") or is_costly(node) or function_name(node) in ROUTING:
            yield node


def _held_bytes(node: Node) -> int:
    """Bytes of memory behind a node's value, for the example inputs; a dimension that is only widened counts once."""
    return sum(_dense_bytes(tensor) for tensor in tensors_of(node.meta.get("val")))


def _dense_bytes(tensor: Any) -> int:
    strides = tensor.stride() if str(tensor.layout) == "torch.strided" else (1,) * tensor.ndim
    sizes = (hint(size) for size, stride in zip(tensor.shape, strides, strict=True) if hint(stride))
    return math.prod(sizes) * int(tensor.element_size())
