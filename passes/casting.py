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

from passes.layers import function_of, is_functional
from passes.operators import PROMOTING, float_leaves, is_cast, operator_name, tensor_leaves
from passes.pieces import attribute
from passes.precision_lists import CLEAR, colours
from passes.scaled import Scaled
from passes.spans import called_path
from rewrite import ORIGIN, RECOMPUTE, cast_weight

if TYPE_CHECKING:
    from torch.fx import Node

    from passes.colouring import Colours
    from rewrite import Region

HEAD_SCALE = 2.0**-4
LOSSES = ("cross_entropy", "nn.CrossEntropyLoss", "log_softmax", "nn.LogSoftmax", "binary_cross_entropy_with_logits",
          "nn.BCEWithLogitsLoss")  # fmt: skip
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
        for node in list(self.region.nodes()):
            if node in self.low and operator_name(self.region, node) in ("matmul", "bmm"):
                self._scale_first(node)
        heads = self._heads()
        for node in list(self.region.nodes()):
            if self._is_idle_cast(node):
                node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
                self.graph.erase_node(node)
                continue
            head = node in heads
            if node.op == "call_module" and node in self.low and is_functional(self.region, node):
                node = self._written_out(node)
            if head:
                self._shrink(node)
            self._give(node)
            self._retype(node)
            if head:
                self._enlarge(node)
        self._drop_unread()
        self.count.nodes = tuple(node.name for node in self.made.values() if node in self.source_of)
        return self.count

    # Graph edits before casts.

    def _scale_first(self, product: Node) -> None:
        """Scale one factor of a product of queries and keys in place of the scores, which may not fit."""
        users = list(product.users)
        if self.dtype is not torch.float16 or len(users) != 1 or not isinstance(product.args[0], fx.Node):
            return
        scale = users[0]
        factor = _factor(operator_name(self.region, scale), scale)
        if scale in self.low or factor is None or scale.args[0] is not product or not 0 < abs(factor) < 1:
            return
        query = product.args[0]
        with self.graph.inserting_before(product):
            scaled = self.graph.call_function(torch.mul, (query, factor))
        scaled.meta.update({key: scale.meta[key] for key in ("module_path", "source") if key in scale.meta})
        scaled.meta["val"] = _like(self.captured[query], torch.float32)
        scaled.meta[ORIGIN] = (scale.name,)
        _share_segment(scaled, product)
        self.captured[scaled], self.span[scaled] = scaled.meta["val"], self.span[product]
        self.low.add(scaled)
        product.replace_input_with(query, scaled)
        scale.replace_all_uses_with(product)
        self.graph.erase_node(scale)

    # Heads, whose logits may not fit.

    def _heads(self) -> set[Node]:
        """Products that give the logits of a loss and are used for nothing else in low precision.

        What lies between is taken out of the low precision.
        """
        found: set[Node] = set()
        for node in self.region.nodes() if self.dtype is torch.float16 else ():
            if node in self.low and operator_name(self.region, node) in ("linear", "nn.Linear", "Conv1D"):
                between = self._between_loss(node)
                if between is not None:
                    found.add(node)
                    self.low -= between
        return found

    def _between_loss(self, product: Node) -> set[Node] | None:
        """Nodes without effect on values between a product and a loss; None where none is, or others use it."""
        between: set[Node] = set()
        open_, meets = list(product.users), False
        while open_:
            user = open_.pop()
            name = operator_name(self.region, user)
            if user in between:
                continue
            if is_cast(self.region, user) or (colours().get(name) == CLEAR and float_leaves(user)):
                between.add(user)
                open_ += list(user.users)
            elif user in self.low:
                return None
            meets |= name in LOSSES
        return between if meets else None

    def _shrink(self, product: Node) -> None:
        """Have a head give a part of its logits: 70,000 does not fit in fp16, and a power of two rounds nothing."""
        arguments = dict(zip(("input", "weight", "bias"), product.args, strict=False)) | dict(product.kwargs)
        factors = {"input": (HEAD_SCALE, 1.0), "weight": (1.0, 1 / HEAD_SCALE), "bias": (HEAD_SCALE, 1.0)}
        parts: list[Any] = []
        for name, (forward, backward) in factors.items():
            given = arguments.get(name)
            if not isinstance(given, fx.Node):
                parts.append(given)
                continue
            with self.graph.inserting_before(product):
                part = self._times(given, Scaled(forward, backward), product)
            self.low.add(part)
            self._give(part)
            self._retype(part)
            parts.append(part)
        product.args, product.kwargs = tuple(parts), {}

    def _enlarge(self, product: Node) -> None:
        """The whole logits, in fp32."""
        users = list(product.users)
        after = product.next
        wide = self._cast(product, torch.float32, after, within=False)
        with self.graph.inserting_before(after):
            whole = self._times(wide, Scaled(1 / HEAD_SCALE, 1.0), product)
        whole.meta["val"] = _like(wide.meta["val"], torch.float32)
        for user in users:
            user.replace_input_with(product, whole)

    def _times(self, source: Node, scaled: Scaled, like: Node) -> Node:
        made = self.graph.call_function(scaled, (source,))
        value: Any = self.captured.get(source, source.meta["val"])
        _describe(made, source, _like(value, torch.float32), like)
        self.captured[made], self.span[made] = made.meta["val"], self.span[like]
        return made

    def _is_idle_cast(self, node: Node) -> bool:
        """Whether a cast gives the dtype that there is: what reads it says by itself which it needs."""
        if not is_cast(self.region, node) or not isinstance(node.args[0], fx.Node) or _moves(node):
            return False
        had: Any = self.captured.get(node.args[0])
        gives: Any = self.captured.get(node)
        if not hasattr(had, "dtype") or not had.is_floating_point():
            return False
        return had.dtype == gives.dtype or (node in self.low and gives.dtype == torch.float32)

    def _written_out(self, node: Node) -> Node:
        """A layer as the function it calls, under its name."""
        module, path = self.region.called(node), str(node.target)
        function, more = function_of(module)
        weight = attribute(self.region, f"{path}.weight", node)
        bias = None if module.bias is None else attribute(self.region, f"{path}.bias", node)
        for each in (weight, bias):
            if each is not None:
                self.captured.setdefault(each, each.meta["val"])
        with self.graph.inserting_before(node):
            if operator_name(self.region, node) == "Conv1D":
                turned = self.graph.call_function(torch.t, (weight,))
                turned.meta.update(val=_turned(weight.meta["val"]), module_path=called_path(self.region, node))
                turned.meta[ORIGIN] = (node.name,)
                _share_segment(turned, node)
                self.captured[turned], self.span[turned] = turned.meta["val"], self.span[node]
                self.low.add(turned)
                self._give(turned)
                self._retype(turned)
                weight = turned
            made = self.graph.call_function(function, (node.args[0], weight, bias, *more))
        made.meta = {**node.meta, "module_path": called_path(self.region, node), ORIGIN: (node.name,), "random": False}
        made.meta.pop("module_type", None)
        self.captured[made], self.span[made] = self.captured[node], self.span[node]
        self.low.add(made)
        name = node.name
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)
        made.name = name
        return made

    def _drop_unread(self) -> None:
        """Casts that are read past, and weights whose only readers were layers that are written out now."""
        for node in reversed(list(self.region.nodes())):
            if not node.users and (node.op == "get_attr" or is_cast(self.region, node)):
                self.graph.erase_node(node)

    # Casts.

    def _give(self, node: Node) -> None:
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
        node.replace_input_with(source, self._cast(source, dtype, node, within=masks and mask is source))

    def _cast(self, source: Node, dtype: torch.dtype, reader: Node, *, within: bool) -> Node:
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
        _describe(made, origin, _cast_value(origin.meta["val"], dtype, fresh=origin.op == "get_attr"), reader)
        self.span[made] = self.span[reader]
        self.source_of[made] = origin
        self.made[key] = made
        return made

    def _clamped(self, mask: Node, dtype: torch.dtype, reader: Node) -> Node:
        """A mask whose least number is the least of `dtype`: -inf would make a row that is masked whole NaN."""
        made = self.graph.call_method("clamp", (mask,), {"min": torch.finfo(dtype).min})
        _describe(made, mask, _like(mask.meta["val"], mask.meta["val"].dtype), reader)
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

    def _retype(self, node: Node) -> None:
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
            then = tensor_leaves(self.captured.get(self.source_of.get(source, source)))
            now = tensor_leaves(source.meta.get("val"))
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
            return had if dtype == had.dtype else _like(had, dtype)
        return _same_view(had, *source, dtype)

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


def _factor(name: str, node: Node) -> float | None:
    """What a node multiplies its first argument by, if that is a number."""
    if name not in ("mul", "div") or len(node.args) != 2 or node.kwargs or type(node.args[1]) not in (int, float):
        return None
    number = float(node.args[1])  # type: ignore[arg-type]
    return number if name == "mul" else 1 / number if number else None


def _moves(node: Node) -> bool:
    """Whether a cast names a device, or wants a copy."""
    given = (*node.args[1:], *node.kwargs.values())
    return any(isinstance(each, (torch.device, str)) for each in given) or bool(node.kwargs.get("copy"))


def _is_tensor(node: Node) -> bool:
    value = node.meta.get("val")
    return hasattr(value, "untyped_storage") and bool(float_leaves(node))


def _describe(made: Node, like: Node, value: Any, reader: Node) -> None:
    made.meta.update({key: reader.meta[key] for key in ("module_path", "source") if key in reader.meta})
    made.meta["val"] = value
    made.meta[ORIGIN] = (like.name,)
    _share_segment(made, reader)


def _share_segment(made: Node, reader: Node) -> None:
    if RECOMPUTE in reader.meta:
        made.meta[RECOMPUTE] = reader.meta[RECOMPUTE]


def _cast_value(value: Any, dtype: torch.dtype, *, fresh: bool) -> Any:
    """A fake of `value.to(dtype)`."""
    if fresh:
        return _like(value, dtype)
    with value.fake_mode, torch.no_grad():
        return value.detach().to(dtype).requires_grad_(value.requires_grad)


def _like(value: Any, dtype: torch.dtype) -> Any:
    """A fake of the same shape and strides, in storage of its own."""
    with value.fake_mode, torch.no_grad():
        return torch.empty_strided(value.size(), value.stride(), dtype=dtype).requires_grad_(value.requires_grad)


def _turned(value: Any) -> Any:
    with value.fake_mode, torch.no_grad():
        return value.detach().t().requires_grad_(value.requires_grad)


def _same_view(had: Any, was: Any, now: Any, dtype: torch.dtype) -> Any:
    """What `had`, which lay in the storage of `was`, is now that `now` stands in the place of `was`."""
    if had is was:
        return now
    if not hasattr(now, "untyped_storage") or now.dtype != dtype or now.stride() != was.stride():
        return had if dtype == had.dtype else _like(had, dtype)
    if now is was:
        return had
    with had.fake_mode, torch.no_grad():
        view = now.detach().as_strided(had.size(), had.stride(), had.storage_offset())
    return view.requires_grad_(had.requires_grad)
