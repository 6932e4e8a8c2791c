"""Whether what reads a gradient gives the same bits however the gradient lies in memory.

A copy of a part lies more densely than the part did. Most kernels make their gradient dense first, or work on it
element by element. A sum over it, as for the bias of a broadcast addition or the statistics of a batch norm, is added
up in the order in which it lies: there a copy would change bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from passes.frozen_part import needs_grad
from passes.nodes import function_name
from passes.operators import operator_name
from passes.position_wise import told

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.fx import Node

    from passes.callers import Callers
    from rewrite import Region

READERS = frozenset(
    """celu cos div elu exp gelu group_norm hardsigmoid hardswish hardtanh layer_norm leaky_relu logsigmoid mish mul pow
    relu relu6 selu sigmoid silu sin softplus softsign sqrt tanh avg_pool2d interpolate max_pool2d chunk narrow select
    split unbind""".split()  # noqa: SIM905 - a list of this length reads better so
)
"""Functions whose backward makes another tensor of the gradient before anything is summed."""
READING_LAYERS = (
    nn.AvgPool2d, nn.CELU, nn.ELU, nn.GELU, nn.GroupNorm, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LayerNorm,
    nn.LeakyReLU, nn.LogSigmoid, nn.MaxPool2d, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus,
    nn.Softsign, nn.Tanh, nn.Upsample,
)  # fmt: skip
CONVOLUTIONS = frozenset("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d".split())  # noqa: SIM905
CONVOLVING_LAYERS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
"""They make it dense too, but add up the gradient of a bias as it lies: the same for a part of the channels, and for
one of the batch, but not for one that is cut along a row."""
SHAPE_KEPT = frozenset(
    """add bfloat16 clone contiguous double dropout float half own_gradient sub to type type_as""".split()  # noqa: SIM905
)
HANDING_ON = SHAPE_KEPT | frozenset(
    """cat concat concatenate flatten getitem movedim permute reshape squeeze swapaxes transpose unflatten unsqueeze
    view view_as""".split()  # noqa: SIM905
)
"""Functions whose backward may give the gradient on as it lies."""
SHAPE_KEPT_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Identity)
HANDING_LAYERS = (*SHAPE_KEPT_LAYERS, nn.Flatten, nn.Unflatten)


def why_layout_matters(callers: Callers, region: Region, node: Node, *, by_channels: bool) -> str:
    """What would add up the gradient of a node in another order if it lay differently; empty where nothing would.

    `by_channels` tells that the gradient is a part of the batch or the channels (dimension 0 or 1) of the joint one.
    """
    return _Walk(callers).reason(region, node, by_channels)


class _Walk:
    """Back from a value over all that is handed its gradient."""

    def __init__(self, callers: Callers) -> None:
        self.callers = callers
        self.seen: set[tuple[Node, bool]] = set()

    def reason(self, region: Region, node: Node, by_channels: bool) -> str:
        if (node, by_channels) in self.seen or node.op == "get_attr" or not needs_grad(node):
            return ""
        self.seen.add((node, by_channels))
        if node.op == "placeholder":
            return self._of_input(region, node, by_channels)
        if node.op == "call_module":
            return self._of_layer(region, node, by_channels)
        name = operator_name(region, node)
        if name in READERS or (name in CONVOLUTIONS and by_channels and _is_batched(node, _weight(node))):
            return ""
        if name not in HANDING_ON or (name in ("add", "sub") and _is_broadcast(node)):
            return told(region, node)
        return self._first(region, node.all_input_nodes, by_channels and (name in SHAPE_KEPT or joins_channels(node)))

    def _of_input(self, region: Region, node: Node, by_channels: bool) -> str:
        calls = self.callers.of(region)
        if not calls:
            return f"what made the input {node.target!r} of {region.class_name} is not known here: it"
        return next(filter(None, (self.reason(call.region, call.given[node], by_channels) for call in calls)), "")

    def _of_layer(self, region: Region, node: Node, by_channels: bool) -> str:
        if node.meta.get("block"):
            return self._of_block(region, node, by_channels)
        layer = region.called(node)
        kind = type(layer)
        if kind in READING_LAYERS:
            return ""
        if kind in CONVOLVING_LAYERS and (layer.bias is None or (by_channels and _is_batched(node, layer.weight))):
            return ""
        if kind not in HANDING_LAYERS:
            return told(region, node)
        return self._first(region, node.all_input_nodes, by_channels and kind in SHAPE_KEPT_LAYERS)

    def _of_block(self, region: Region, node: Node, by_channels: bool) -> str:
        """What reads the gradients of all that the block gives, in every region that stands for it."""
        found = self.callers.within(region, node)
        if not found:
            return told(region, node)
        ends = [(each, end) for each in found for end in each.nodes() if end.op == "output"]
        return next(filter(None, (self._first(each, end.all_input_nodes, by_channels) for each, end in ends)), "")

    def _first(self, region: Region, nodes: Iterable[Node], by_channels: bool) -> str:
        return next(filter(None, (self.reason(region, each, by_channels) for each in nodes)), "")


def joins_channels(node: Node) -> bool:
    """Whether a call joins along dimension 0 or 1: the batch, or the channels."""
    if node.target not in (torch.cat, torch.concat, torch.concatenate):
        return False
    along = node.kwargs.get("dim", node.kwargs.get("axis", node.args[1] if len(node.args) > 1 else 0))
    return isinstance(along, int) and along % node.meta["val"].dim() <= 1


def _weight(node: Node) -> Any:
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    return getattr(weight, "meta", {}).get("val")


def _is_batched(node: Node, weight: Any) -> bool:
    """Whether the channels of a convolution's result are dimension 1."""
    return weight is not None and node.meta["val"].dim() == weight.dim()


def _is_broadcast(node: Node) -> bool:
    """Whether a gradient is summed for an operand that is smaller than the result."""
    made = str(tuple(node.meta["val"].shape))
    sources = [source for source in node.all_input_nodes if needs_grad(source)]
    return any(str(tuple(source.meta["val"].shape)) != made for source in sources) or function_name(node) == "rsub"
