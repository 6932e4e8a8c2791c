"""Run one node of a graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx, nn


def run_node(node: fx.Node, values: Mapping[fx.Node, Any], module: nn.Module) -> Any:
    """What `node`, in a graph of `module`, gives for the values of the nodes before it."""
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(module)
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    function = module.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    assert callable(function)
    return function(*args, **kwargs)
