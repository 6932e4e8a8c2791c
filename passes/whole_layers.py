"""Layers that stay in fp32: their products run inside one call, with weights that no cast of the graph reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from passes.layers import has_weights, is_functional
from passes.operators import is_wide, operator_name
from passes.precision_lists import ALLOW, colours

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite import Region

WITHOUT_PRODUCTS = (nn.Embedding, nn.EmbeddingBag)


def why_single(region: Region, node: Node) -> str:
    """Why a layer with products computes in fp32; empty for one that is cast, for one without, and for a block."""
    if node.op != "call_module" or node.meta.get("block") or not is_wide(node) or not has_weights(region, node):
        return ""
    name, module = operator_name(region, node), region.called(node)
    listed = colours().get(name, "")
    if listed == ALLOW and node.meta.get("hooked"):
        return f"{name} stays in fp32: it has hooks, which are called with what it takes and gives"
    if listed == ALLOW:
        return "" if is_functional(region, node) else f"{name} stays in fp32: {_how_called(module)}"
    if is_parametrized(module):
        return f"{name} stays in fp32: its weight is computed from others at each call"
    if listed or not name.startswith("nn.") or isinstance(module, WITHOUT_PRODUCTS):
        return ""
    if isinstance(module, nn.RNNBase):
        return (
            f"{name} stays in fp32: its recurrence runs in one call, and half precision would round the state each step"
        )
    if isinstance(module, nn.MultiheadAttention):
        return (
            f"{name} stays in fp32: its softmax runs in one call with its products, in their precision. "
            "Next: attention of nn.Linear and scaled_dot_product_attention is cast around the softmax"
        )
    return f"{name} stays in fp32: no list says what its products are safe in"


def _how_called(module: nn.Module) -> str:
    mode = getattr(module, "padding_mode", "zeros")
    return f"it pads with padding_mode={mode}" if mode != "zeros" else "its call is not written out as a function"
