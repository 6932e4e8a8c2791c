"""What a node calls, by the name under which the precision lists know it, and the tensors it gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from passes.nodes import tensors_of
from rewrite import operator_name as operator_name

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite import Region

CASTS = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as"})
PROMOTING = frozenset({"add", "sub", "mul", "div", "maximum", "minimum", "where", "lerp", "eq", "ne", "lt", "le", "gt",
                       "ge"})  # fmt: skip
"""Elementwise operators that compute, and give, the widest dtype among their operands."""


def float_leaves(node: Node) -> list[Any]:
    """The floating-point tensors that a node gives."""
    return [leaf for leaf in tensors_of(node.meta.get("val")) if leaf.is_floating_point()]


def is_wide(node: Node) -> bool:
    """Whether a node gives fp32, and no other floating-point numbers."""
    found = float_leaves(node)
    return bool(found) and all(str(leaf.dtype) == "torch.float32" for leaf in found)


def is_cast(region: Region, node: Node) -> bool:
    """Whether a node may change the dtype of one tensor and does nothing else."""
    return node.op == "call_method" and operator_name(region, node) in CASTS and hasattr(node.meta.get("val"), "dtype")


def sources(node: Node) -> list[Node]:
    """The nodes whose floating-point tensors a node takes."""
    return [source for source in node.all_input_nodes if float_leaves(source)]


def constants(node: Node) -> Iterator[float]:
    """The Python numbers among a node's arguments that are computed with."""
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, float):
            yield argument
