"""Layers with weights, written out as the function they call, so that their weights are tensors of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn import functional

from passes.operators import operator_name

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite import Region

QUANTIZED = ("Linear8bitLt", "Linear4bit", "LinearNF4", "LinearFP4")
"""Layers that cast for themselves: they take half precision and give it."""

CONVOLUTIONS: dict[type, Callable[..., Any]] = {
    nn.Conv1d: functional.conv1d, nn.Conv2d: functional.conv2d, nn.Conv3d: functional.conv3d,
}  # fmt: skip
TRANSPOSED: dict[type, Callable[..., Any]] = {
    nn.ConvTranspose1d: functional.conv_transpose1d, nn.ConvTranspose2d: functional.conv_transpose2d,
    nn.ConvTranspose3d: functional.conv_transpose3d,
}  # fmt: skip


def has_weights(region: Region, node: Node) -> bool:
    """Whether a called layer computes with parameters of its own that it does not cast itself."""
    if operator_name(region, node) in QUANTIZED:
        return False
    module = region.called(node)
    return any(tensor.is_floating_point() for tensor in (*module.parameters(), *module.buffers()))


def is_functional(region: Region, node: Node) -> bool:
    """Whether `function_of` can write the call out."""
    module = region.called(node)
    if len(node.args) != 1 or node.kwargs or _is_parametrized(module):
        return False
    if type(module) in CONVOLUTIONS:
        return bool(module.padding_mode == "zeros")
    return type(module) is nn.Linear or operator_name(region, node) == "Conv1D" or type(module) in TRANSPOSED


def function_of(module: nn.Module) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function a layer calls, and its arguments after input, weight and bias; the weight of transformers' Conv1D
    goes in transposed."""
    kind = type(module)
    if kind in CONVOLUTIONS:
        return CONVOLUTIONS[kind], (module.stride, module.padding, module.dilation, module.groups)
    if kind in TRANSPOSED:
        more = (module.stride, module.padding, module.output_padding, module.groups, module.dilation)
        return TRANSPOSED[kind], more
    return functional.linear, ()


def _is_parametrized(module: nn.Module) -> bool:
    """Whether the weight is computed from others at each call."""
    return module._parameters.get("weight") is None
