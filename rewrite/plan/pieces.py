"""Parts of a region's graph as graphs of their own, to be run, planned and tagged by themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from rewrite.plan.rerun import ONCE, changes_mode
from rewrite.plan.stage import size_of
from rewrite.program import value_tensors
from rewrite.text import argument_text, target_text

LEAST_NODES, MOST_NODES = 8, 40
"""How many computing nodes a piece that is cut from a long graph has."""


def extract(
    nodes: Sequence[fx.Node], values: Mapping[fx.Node, Any], returned: Sequence[fx.Node], once: Collection[str]
) -> tuple[fx.Graph, tuple[fx.Node, ...]]:
    """A graph of `nodes` that returns the values of `returned`, and the outside nodes that its placeholders stand for.

    Only tensors come in; numbers and all else from outside (`values`) are written into the graph. Names stay, and the
    nodes named in `once` are marked as not to be run again.
    """
    inside, graph = set(nodes), fx.Graph()
    made: dict[fx.Node, Any] = {}
    outside = list(dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside))
    outside += [node for node in dict.fromkeys(returned) if node not in inside and node not in outside]
    inputs = [node for node in outside if node.op != "get_attr" and _holds_tensors(values.get(node))]
    for node in inputs:
        made[node] = graph.placeholder(node.name)
    for node in outside:
        if node not in made:
            made[node] = graph.node_copy(node) if node.op == "get_attr" else values.get(node)
    for node in nodes:
        made[node] = copied = graph.node_copy(node, made.__getitem__)
        if node.name in once:
            copied.meta[ONCE] = True
    graph.output([made[node] for node in returned])
    return graph, tuple(inputs)


def _holds_tensors(value: Any) -> bool:
    return bool(value_tensors(value))


def graph_key(graph: fx.Graph, module: nn.Module, inputs: Sequence[Any]) -> str:
    """Equal for pieces that are planned alike: the same nodes, run on the same kinds of layers and inputs."""
    lines = [value_text(value) for value in inputs]
    for node in graph.nodes:
        line = f"{node.name} {node.op} {target_text(node.target)} {argument_text((node.args, node.kwargs))}"
        if node.op == "call_module":
            line += module_text(module.get_submodule(str(node.target)))
        lines.append(line)
    return "\n".join(lines)


def module_text(module: nn.Module) -> str:
    """Equal for modules of equal layers in equal modes."""
    parameters = [_tensor_text(tensor) for tensor in (*module.parameters(), *module.buffers())]
    return f"{module!r} {[each.training for each in module.modules()]} {parameters}"


def value_text(value: Any) -> str:
    """Equal for values that are alike: of tensors their kinds, anything else itself."""
    tensors = value_tensors(value)
    return f"{[_tensor_text(tensor) for tensor in tensors]}" if tensors else repr(value)


def _tensor_text(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.requires_grad}"


def narrow_cuts(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """`nodes` in pieces of at least `LEAST_NODES` that compute, cut where the fewest bytes pass from one to the next.

    What is made long before and read long after, such as a skip connection, passes wherever the cut is. A span of
    no_grad or autocast stays in one piece.
    """
    crossing, legal = _crossing_bytes(nodes), _outside_modes(nodes)
    computing = [node.op.startswith("call") and bool(value_tensors(node.meta.get("val"))) for node in nodes]
    pieces: list[list[fx.Node]] = []
    start = 0
    while sum(computing[start:]) > MOST_NODES:
        best, passed = None, 0
        for place in range(start + 1, len(nodes)):
            passed += computing[place - 1]
            if passed > MOST_NODES and best is not None:
                break
            fits = passed >= LEAST_NODES and legal[place] and sum(computing[place:]) >= LEAST_NODES
            if fits and (best is None or crossing[place] <= crossing[best]):
                best = place
        if best is None:
            break
        pieces.append(list(nodes[start:best]))
        start = best
    return [*pieces, list(nodes[start:])]


def _crossing_bytes(nodes: Sequence[fx.Node]) -> list[int]:
    """For each place the bytes of the storages made before it and read from there on."""
    position = {node: place for place, node in enumerate(nodes)}
    born: dict[int, int] = {}
    size: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, node in enumerate(nodes):
        if node.op == "get_attr":
            continue
        for tensor in value_tensors(node.meta.get("val")):
            if tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()._cdata
            born.setdefault(storage, place)
            size[storage] = max(size.get(storage, 0), example_bytes(tensor))
            uses = [position.get(user, len(nodes)) for user in node.users]
            last[storage] = max([last.get(storage, 0), *uses])
    change = [0] * (len(nodes) + 2)
    for storage, place in born.items():
        change[place + 1] += size[storage]
        change[max(last[storage], place) + 1] -= size[storage]
    levels, level = [], 0
    for step in change[: len(nodes) + 1]:
        level += step
        levels.append(level)
    return levels


def example_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, with the sizes of the example."""
    elements = 1
    for size in tensor.shape:
        elements *= size_of(size)
    return elements * tensor.itemsize


def _outside_modes(nodes: Sequence[fx.Node]) -> list[bool]:
    """For each place whether it is outside every span of no_grad and autocast."""
    legal, depth = [True], 0
    for node in nodes:
        depth += changes_mode(node)
        legal.append(depth == 0)
    return legal
