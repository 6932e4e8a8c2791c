"""Small programs made by hand, for tests of what happens between capture and emission."""

from __future__ import annotations

import torch
from torch import fx

from rewrite.program import Program, Region


def block_graph() -> fx.Graph:
    """`dropout(gelu(linear(x)))`, returned with its input as a pair."""
    graph = fx.Graph()
    hidden = graph.placeholder("hidden")
    linear = graph.call_function(torch.nn.functional.linear, (hidden, torch.zeros(8, 8)))
    gelu = graph.call_function(torch.nn.functional.gelu, (linear,), {"approximate": "tanh"})
    dropout = graph.call_function(torch.nn.functional.dropout, (gelu, 0.1))
    output = graph.output((dropout, {"skip": hidden}))
    for node in (hidden, linear, gelu, dropout):
        node.meta["val"] = torch.empty(2, 8, device="meta")
    output.meta["val"] = None
    return graph


def root_graph() -> fx.Graph:
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(2, 8, device="meta")
    for path in ("blocks.0", "blocks.1"):
        node = graph.call_module(path, (node,))
        node.meta["val"] = torch.empty(2, 8, device="meta")
    graph.output(node)
    return graph


def two_blocks() -> Program:
    """A root that calls one block twice, through two instances."""
    root = Region("", ("",), "Model", root_graph(), random=False)
    block = Region("blocks.0", ("blocks.0", "blocks.1"), "Block", block_graph())
    return Program((root, block), root_class="Model")
