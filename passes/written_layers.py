"""Layers of a graph written out as the functions they call, so that their weights can be cast."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from passes.fake_values import share_segment, turned
from passes.layers import function_of
from passes.nodes import called_path
from passes.operators import operator_name
from passes.pieces import attribute
from rewrite import ORIGIN

if TYPE_CHECKING:
    from torch.fx import Node

    from passes.casting import Casting


def written_out(casting: Casting, node: Node) -> Node:
    """A layer as the function it calls, under its name."""
    region, graph = casting.region, casting.graph
    module, path = region.called(node), str(node.target)
    function, more = function_of(module)
    weight = attribute(region, f"{path}.weight", node)
    bias = None if module.bias is None else attribute(region, f"{path}.bias", node)
    for each in (weight, bias):
        if each is not None:
            casting.captured.setdefault(each, each.meta["val"])
    with graph.inserting_before(node):
        if operator_name(region, node) == "Conv1D":
            weight = _turned(casting, weight, node)
        made = graph.call_function(function, (node.args[0], weight, bias, *more))
    made.meta = {**node.meta, "module_path": called_path(region, node), ORIGIN: (node.name,), "random": False}
    made.meta.pop("module_type", None)
    casting.captured[made], casting.span[made] = casting.captured[node], casting.span[node]
    casting.low.add(made)
    name = node.name
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    made.name = name
    return made


def _turned(casting: Casting, weight: Node, node: Node) -> Node:
    """The weight of transformers' Conv1D as `linear` takes it."""
    made = casting.graph.call_function(torch.t, (weight,))
    made.meta.update(val=turned(weight.meta["val"]), module_path=called_path(casting.region, node))
    made.meta[ORIGIN] = (node.name,)
    share_segment(made, node)
    casting.place(made, node)
    casting.low.add(made)
    casting.give(made)
    casting.retype(made)
    return made
