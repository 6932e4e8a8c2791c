"""Fold the nodes of each recompute segment, and of each run without autograd, into one call."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from rewrite import runtime
from rewrite.capture.captured import fills_late
from rewrite.emit.code import compile_graph
from rewrite.emit.detached import detached, detached_runs
from rewrite.emit.planned import SPANS, can_plan, draws_by_itself, owners_of, plan_segment, written_buffers
from rewrite.errors import ContractError
from rewrite.program import Region, value_tensors
from rewrite.recompute.segment import Planned
from rewrite.recompute.whole import Recomputed
from rewrite.tags import KEEP, PASSING, RECOMPUTE


def fold_segments(region: Region) -> fx.Graph:
    """A graph in which every recompute segment of `region` is one call that recomputes in the backward, and every run
    of detached nodes one that runs without autograd.

    Raises ContractError when a segment cannot be run in one piece, because a node outside it stands between two of
    its nodes.
    """
    groups = [*region.segments().values(), *detached_runs(region)]
    if not groups:
        return region.graph
    folded = fx.Graph()
    made: dict[fx.Node, Any] = {}
    module: fx.Node | None = None
    taken = set(groups)
    for group in _in_order(region, groups):
        if group not in taken:
            made[group[0]] = folded.node_copy(group[0], made.__getitem__)
            continue
        if module is None:
            module = folded.create_node("call_function", runtime.this_module, name=runtime.this_module.__name__)
        _call_group(region, group, folded, made, module)
    return folded


def _in_order(region: Region, groups: list[tuple[fx.Node, ...]]) -> list[tuple[fx.Node, ...]]:
    """Single nodes and whole groups in an order in which each finds its inputs made."""
    group_of = {node: nodes for nodes in groups for node in nodes}
    done: set[fx.Node] = set()
    ordered: list[tuple[fx.Node, ...]] = []

    def place(group: tuple[fx.Node, ...], underway: set[tuple[fx.Node, ...]]) -> None:
        if group[0] in done:
            return
        if group in underway:
            on_the_way = (node.meta for nodes in (group, *underway) for node in nodes)
            number = next((meta[RECOMPUTE] for meta in on_the_way if RECOMPUTE in meta), None)
            raise ContractError(
                f"recompute segment {number} of region {region.path or 'root'!r}",
                "a node outside the segment needs a value of it and gives a value to it",
                "tag the nodes between as part of the segment, or end the segment before them",
            )
        for node in group:
            for source in node.all_input_nodes:
                if source not in group:
                    place(group_of.get(source, (source,)), underway | {group})
        done.update(group)
        ordered.append(group)

    for node in region.graph.nodes:
        if node in group_of and node is not group_of[node][-1]:
            continue  # a segment runs where its last node stands
        place(group_of.get(node, (node,)), set())
    return ordered


def _call_group(
    region: Region, group: tuple[fx.Node, ...], folded: fx.Graph, made: dict[fx.Node, Any], module: fx.Node
) -> None:
    inside = set(group)
    sources = list(dict.fromkeys(source for node in group for source in node.all_input_nodes if source not in inside))
    inputs = [node for node in sources if node.op != "get_attr"]
    attributes = [node for node in sources if node.op == "get_attr"]
    outputs = [node for node in group if any(user not in inside for user in node.users)]
    if RECOMPUTE in group[0].meta:
        function, name = _segment(region, group, inputs, outputs, attributes), f"recompute_{group[0].meta[RECOMPUTE]}"
    else:
        function, name = detached(region, group, inputs, outputs), f"detached_{group[0].name}"
    call = folded.call_function(runtime.Named(function, name), (module, *[made[n] for n in inputs]))
    for index, node in enumerate(outputs):
        made[node] = folded.create_node("call_function", operator.getitem, (call, index), name=node.name)
        made[node].meta = dict(node.meta)


def _segment(
    region: Region,
    group: tuple[fx.Node, ...],
    inputs: list[fx.Node],
    outputs: list[fx.Node],
    attributes: list[fx.Node],
) -> Callable[..., tuple[Any, ...]]:
    _check_passing(region, group)
    mutated = _mutated(region, group, inputs)
    whole = _whole(region, group, inputs, outputs, attributes, mutated)
    if can_plan(region, group, mutated):
        return Planned(plan_segment(region, group, inputs, outputs), whole)
    return whole


def _check_passing(region: Region, group: tuple[fx.Node, ...]) -> None:
    """Raise ContractError if a node among calls of blocks that run in one piece would come out of its order."""
    if PASSING not in group[0].meta:
        return
    nodes = list(region.graph.nodes)
    for node in nodes[nodes.index(group[0]) : nodes.index(group[-1])]:
        if node not in group and (node.meta.get("writes") or node.meta.get("random") or node.target in SPANS):
            raise ContractError(
                f"blocks of segment {group[0].meta[RECOMPUTE]} of region {region.path or 'root'!r}",
                f"{node.name} stands between them, and writes, draws random numbers or changes a mode",
                "end the segment before it",
            )


def _whole(
    region: Region,
    group: tuple[fx.Node, ...],
    inputs: list[fx.Node],
    outputs: list[fx.Node],
    attributes: list[fx.Node],
    mutated: tuple[int, ...],
) -> Recomputed:
    wanted = (node for node in group if node.meta.get(KEEP) or draws_by_itself(node))
    kept = [node for node in wanted if value_tensors(node.meta.get("val"))]
    forward = _part(group, inputs, attributes, outputs, kept, again=False)
    again = _part(group, inputs, attributes, outputs, kept, again=True)
    return Recomputed(
        region.path,
        compile_graph(forward, region.path),
        compile_graph(again, region.path),
        results=len(outputs),
        owners=owners_of(group),
        written_buffers=written_buffers(region, group),
        mutated_inputs=mutated,
        whole=any(fills_late(node) for node in group),
    )


def _part(
    group: tuple[fx.Node, ...],
    inputs: list[fx.Node],
    attributes: list[fx.Node],
    outputs: list[fx.Node],
    kept: list[fx.Node],
    *,
    again: bool,
) -> fx.Graph:
    """The segment as a graph: for the forward, which also returns what is kept, or the recompute, which takes it."""
    part = fx.Graph()
    copied: dict[fx.Node, Any] = {}
    saved: list[fx.Node] = []
    for node in [*inputs, *(kept if again else [])]:
        copied[node] = part.placeholder(node.name)
    for node in attributes:  # read inside: a weight is never held as an input
        copied[node] = part.node_copy(node)
    for node in group:
        if node in copied:
            continue
        if node in kept:
            arguments, keywords = fx.map_arg((node.args, node.kwargs), copied.__getitem__)
            if node.op == "call_module":
                arguments = (part.get_attr(str(node.target)), *arguments)
            copied[node] = part.create_node(
                "call_function", runtime.Kept(node.op, node.target), arguments, keywords, name=node.name
            )
            saved.append(part.call_function(runtime.copied, (copied[node],)))
        else:
            copied[node] = part.node_copy(node, copied.__getitem__)
    results = tuple(copied[node] for node in outputs)
    part.output(results if again else (*results, *saved))
    return part


def _mutated(region: Region, group: tuple[fx.Node, ...], inputs: list[fx.Node]) -> tuple[int, ...]:
    """Places of the inputs whose storage a node of the segment writes to."""
    names = {name for node in group for name in node.meta.get("writes", ())}
    written = {key for node in region.graph.nodes if node.name in names for key in _storages(node)}
    return tuple(place for place, node in enumerate(inputs) if written & _storages(node))


def _storages(node: fx.Node) -> set[int]:
    dense = [tensor for tensor in value_tensors(node.meta.get("val")) if tensor.layout == torch.strided]
    return {tensor.untyped_storage()._cdata for tensor in dense}
