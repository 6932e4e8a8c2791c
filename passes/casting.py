"""Put casts where the precision changes: nowhere else, and each value once.

A cast is a `to` node, or for a weight a call of `rewrite.cast_weight`, whose copy outlives the call. An operator that
computes in the widest of its operands' types is given no cast where one operand is wide already.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from passes.fake_values import cast_value, describe, like, same_view
from passes.layers import is_functional
from passes.nodes import tensors_of
from passes.operators import PROMOTING, float_leaves, is_cast, operator_name
from passes.scaled_products import enlarge, heads_of_losses, scale_scores_first, shrink
from passes.written_layers import written_out
from rewrite import RECOMPUTE, cast_weight

if TYPE_CHECKING:
    from torch.fx import Node

    from passes.colouring import Colours
    from rewrite import Region

MASK_PLACE = 3
"""Position of the mask among the arguments of `scaled_dot_product_attention`."""


@dataclass
class Count:
    """What was put into one region."""

    narrowed: int = 0
    widened: int = 0
    weights: int = 0
    low: int = 0
    """Operators that compute in low precision."""
    nodes: tuple[str, ...] = ()

    @property
    def casts(self) -> int:
        return self.narrowed + self.widened


class Casting:
    """Writes one region anew."""

    def __init__(self, region: Region, colours: Colours, dtype: torch.dtype) -> None:
        self.region, self.graph, self.dtype = region, region.graph, dtype
        self.low, self.free, self.span = set(colours.low), colours.free, dict(colours.span)
        self.captured = {node: node.meta.get("val") for node in region.nodes()}
        """What nodes gave before this pass."""
        self.made: dict[Any, Node] = {}
        self.source_of: dict[Node, Node] = {}
        """Cast -> what it casts."""
        self.count = Count()

    def run(self) -> Count:
        """Put casts in; says how many."""
        scale_scores_first(self)
        heads = heads_of_losses(self)
        for node in list(self.region.nodes()):
            if self._is_idle_cast(node):
                node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
                self.graph.erase_node(node)
                continue
            head = node in heads
            if node.op == "call_module" and node in self.low and is_functional(self.region, node):
                node = written_out(self, node)
            if head:
                shrink(self, node)
            self.give(node)
            self.retype(node)
            if head:
                enlarge(self, node)
        self._drop_unread()
        self.count.nodes = tuple(node.name for node in self.made.values() if node in self.source_of)
        return self.count

    def place(self, made: Node, beside: Node) -> None:
        """Take a new node in, which stands in the spans that `beside` stands in."""
        self.captured[made], self.span[made] = made.meta["val"], self.span[beside]

    def _is_idle_cast(self, node: Node) -> bool:
        """Whether a cast gives the dtype that there is: what reads it says by itself which it needs."""
        if not is_cast(self.region, node) or not isinstance(node.args[0], fx.Node) or _moves(node):
            return False
        had: Any = self.captured.get(node.args[0])
        gives: Any = self.captured.get(node)
        if not hasattr(had, "dtype") or not had.is_floating_point():
            return False
        return had.dtype == gives.dtype or (node in self.low and gives.dtype == torch.float32)

    def _drop_unread(self) -> None:
        """Casts that are read past, and weights whose only readers were layers that are written out now."""
        for node in reversed(list(self.region.nodes())):
            if not node.users and (node.op == "get_attr" or is_cast(self.region, node)):
                self.graph.erase_node(node)

    # Casts.

    def give(self, node: Node) -> None:
        """Give a node its operands in the precision it computes in."""
        if (
            node in self.free
            or node.op in ("placeholder", "get_attr")
            or (is_cast(self.region, node) and node not in self.low)
        ):
            return
        operands = [source for source in node.all_input_nodes if _is_tensor(source)]
        if node in self.low:
            self.count.low += 1
            for source in operands:
                if not self._follows(node, source, operands):
                    self._replace(node, source, self.dtype)
            return
        if self._promotes(node, operands):
            return
        for source in operands:
            self._replace(node, source, self._captured_dtype(source))

    def _follows(self, node: Node, source: Node, operands: list[Node]) -> bool:
        """Whether a number, as torch calls a tensor without dimensions, leaves the result its precision."""
        if operator_name(self.region, node) not in PROMOTING or source.meta["val"].dim():
            return False
        return any(other.meta["val"].dim() and other is not source for other in operands)

    def _promotes(self, node: Node, operands: list[Node]) -> bool:
        """Whether the operator computes in fp32 as it stands, because an operand with dimensions is in it."""
        if operator_name(self.region, node) not in PROMOTING or node.meta.get("writes") or not _is_tensor(node):
            return False
        return any(source.meta["val"].dim() and source.meta["val"].dtype == torch.float32 for source in operands)

    def _captured_dtype(self, source: Node) -> torch.dtype:
        """What a node gave before this pass, also if it is a cast of ours."""
        value: Any = self.captured.get(self.source_of.get(source, source))
        dtype: torch.dtype = value.dtype
        return dtype

    def _replace(self, node: Node, source: Node, dtype: torch.dtype) -> None:
        value = source.meta["val"]
        if not value.is_floating_point() or value.dtype == dtype:
            return
        masks = node in self.low and operator_name(self.region, node) == "scaled_dot_product_attention"
        mask = node.kwargs.get("attn_mask", node.args[MASK_PLACE] if len(node.args) > MASK_PLACE else None)
        node.replace_input_with(source, self.cast(source, dtype, node, within=masks and mask is source))

    def cast(self, source: Node, dtype: torch.dtype, reader: Node, *, within: bool) -> Node:
        """A node that gives `source` in `dtype` to `reader`; `within`: clamped to what the dtype holds."""
        origin = self.source_of.get(source, source)
        if origin.meta["val"].dtype == dtype:
            return origin
        before: Any = origin.args[0] if is_cast(self.region, origin) else None
        if isinstance(before, fx.Node) and _is_tensor(before) and before.meta["val"].dtype == dtype:
            return before  # the author's own cast of a weight that is in this precision
        key = (origin, dtype, within, self.span[reader], reader.meta.get(RECOMPUTE), self._volatile(origin, reader))
        if key in self.made:
            return self.made[key]
        with self.graph.inserting_before(reader):
            given = self._clamped(origin, dtype, reader) if within else origin
            if origin.op == "get_attr":
                made = self.graph.call_function(cast_weight, (given, dtype))
                self.count.weights += 1
            else:
                made = self.graph.call_method("to", (given, dtype))
                self._count(dtype)
        describe(made, origin, cast_value(origin.meta["val"], dtype, fresh=origin.op == "get_attr"), reader)
        self.span[made] = self.span[reader]
        self.source_of[made] = origin
        self.made[key] = made
        return made

    def _clamped(self, mask: Node, dtype: torch.dtype, reader: Node) -> Node:
        """A mask whose least number is the least of `dtype`: -inf would make a row that is masked whole NaN."""
        made = self.graph.call_method("clamp", (mask,), {"min": torch.finfo(dtype).min})
        describe(made, mask, like(mask.meta["val"], mask.meta["val"].dtype), reader)
        self.span[made] = self.span[reader]
        return made

    def _volatile(self, source: Node, reader: Node) -> str:
        """A value that is written in place is cast for each reader."""
        return reader.name if any(source.name in user.meta.get("writes", ()) for user in source.users) else ""

    def _count(self, dtype: torch.dtype) -> None:
        if dtype == self.dtype:
            self.count.narrowed += 1
        else:
            self.count.widened += 1

    # What nodes give.

    def retype(self, node: Node) -> None:
        """Say what a node gives now."""
        if node.op in ("placeholder", "output", "get_attr"):
            return
        if node in self.low:
            self._retarget(node)
        had = self.captured.get(node)
        if had is None:
            return
        before: dict[int, tuple[Any, Any]] = {}
        for source in node.all_input_nodes:
            then = tensors_of(self.captured.get(self.source_of.get(source, source)))
            now = tensors_of(source.meta.get("val"))
            pairs = (pair for pair in zip(then, now, strict=True) if pair[0].layout == torch.strided)
            before.update({each[0].untyped_storage()._cdata: each for each in pairs})
        node.meta["val"] = self._value(had, before, self.dtype if node in self.low else None)

    def _value(self, had: Any, before: dict[int, tuple[Any, Any]], low: torch.dtype | None) -> Any:
        if isinstance(had, (tuple, list)) and not hasattr(had, "_fields"):
            return type(had)(self._value(item, before, low) for item in had)
        if not hasattr(had, "untyped_storage") or had.layout != torch.strided:
            return had
        dtype = low if low is not None and had.dtype == torch.float32 else had.dtype
        source = before.get(had.untyped_storage()._cdata)
        if source is None:
            return had if dtype == had.dtype else like(had, dtype)
        return same_view(had, *source, dtype)

    def _retarget(self, node: Node) -> None:
        """Dtypes and constants among the arguments, made to fit the low precision."""
        args = map_aggregate(node.args, self._fitting)
        kwargs = map_aggregate(dict(node.kwargs), self._fitting)
        node.args, node.kwargs = args, kwargs
        if is_cast(self.region, node) and node.target == "float":
            node.target, node.args, node.kwargs = "to", (node.args[0], self.dtype), {}

    def _fitting(self, value: Any) -> Any:
        if value is torch.float32:
            return self.dtype
        if type(value) is float and math.isfinite(value):
            largest = torch.finfo(self.dtype).max
            return min(max(value, -largest), largest)
        return value


def _moves(node: Node) -> bool:
    """Whether a cast names a device, or wants a copy."""
    given = (*node.args[1:], *node.kwargs.values())
    return any(isinstance(each, (torch.device, str)) for each in given) or bool(node.kwargs.get("copy"))


def _is_tensor(node: Node) -> bool:
    value = node.meta.get("val")
    return hasattr(value, "untyped_storage") and bool(float_leaves(node))
