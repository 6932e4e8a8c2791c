"""Products whose results may not fit in fp16, computed on scaled factors: scores of attention, and logits of a loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from passes.fake_values import describe, like, share_segment
from passes.operators import float_leaves, is_cast, operator_name
from passes.precision_lists import CLEAR, colours
from passes.scaled import Scaled
from rewrite import ORIGIN

if TYPE_CHECKING:
    from torch.fx import Node

    from passes.casting import Casting

HEAD_SCALE = 2.0**-4
LOSSES = ("cross_entropy", "nn.CrossEntropyLoss", "log_softmax", "nn.LogSoftmax", "binary_cross_entropy_with_logits",
          "nn.BCEWithLogitsLoss")  # fmt: skip


def scale_scores_first(casting: Casting) -> None:
    """Scale one factor of each product of queries and keys in place of the scores."""
    if casting.dtype is not torch.float16:
        return
    for node in list(casting.region.nodes()):
        if node in casting.low and operator_name(casting.region, node) in ("matmul", "bmm"):
            _scale_first(casting, node)


def _scale_first(casting: Casting, product: Node) -> None:
    users, query = list(product.users), product.args[0]
    if len(users) != 1 or not isinstance(query, fx.Node):
        return
    scale = users[0]
    factor = _factor(operator_name(casting.region, scale), scale)
    if scale in casting.low or factor is None or scale.args[0] is not product or not 0 < abs(factor) < 1:
        return
    with casting.graph.inserting_before(product):
        scaled = casting.graph.call_function(torch.mul, (query, factor))
    scaled.meta.update({key: scale.meta[key] for key in ("module_path", "source") if key in scale.meta})
    scaled.meta["val"] = like(casting.captured[query], torch.float32)
    scaled.meta[ORIGIN] = (scale.name,)
    share_segment(scaled, product)
    casting.place(scaled, product)
    casting.low.add(scaled)
    product.replace_input_with(query, scaled)
    scale.replace_all_uses_with(product)
    casting.graph.erase_node(scale)


def _factor(name: str, node: Node) -> float | None:
    """What a node multiplies its first argument by, if that is a number."""
    if name not in ("mul", "div") or len(node.args) != 2 or node.kwargs or type(node.args[1]) not in (int, float):
        return None
    number = float(node.args[1])  # type: ignore[arg-type]
    return number if name == "mul" else 1 / number if number else None


def heads_of_losses(casting: Casting) -> set[Node]:
    """Products that give the logits of a loss and are used for nothing else in low precision.

    What lies between is taken out of the low precision.
    """
    found: set[Node] = set()
    for node in casting.region.nodes() if casting.dtype is torch.float16 else ():
        if node in casting.low and operator_name(casting.region, node) in ("linear", "nn.Linear", "Conv1D"):
            between = _between_loss(casting, node)
            if between is not None:
                found.add(node)
                casting.low -= between
    return found


def _between_loss(casting: Casting, product: Node) -> set[Node] | None:
    """Nodes without effect on values between a product and a loss; None where none is, or others use it."""
    between: set[Node] = set()
    open_, meets = list(product.users), False
    while open_:
        user = open_.pop()
        name = operator_name(casting.region, user)
        if user in between:
            continue
        if is_cast(casting.region, user) or (colours().get(name) == CLEAR and float_leaves(user)):
            between.add(user)
            open_ += list(user.users)
        elif user in casting.low:
            return None
        meets |= name in LOSSES
    return between if meets else None


def shrink(casting: Casting, product: Node) -> None:
    """Have a head give a part of its logits: 70,000 does not fit in fp16, and a power of two rounds nothing."""
    arguments = dict(zip(("input", "weight", "bias"), product.args, strict=False)) | dict(product.kwargs)
    factors = {"input": (HEAD_SCALE, 1.0), "weight": (1.0, 1 / HEAD_SCALE), "bias": (HEAD_SCALE, 1.0)}
    parts: list[Any] = []
    for name, (forward, backward) in factors.items():
        given = arguments.get(name)
        if not isinstance(given, fx.Node):
            parts.append(given)
            continue
        with casting.graph.inserting_before(product):
            part = _times(casting, given, Scaled(forward, backward), product)
        casting.low.add(part)
        casting.give(part)
        casting.retype(part)
        parts.append(part)
    product.args, product.kwargs = tuple(parts), {}


def enlarge(casting: Casting, product: Node) -> None:
    """Give the whole logits, in fp32, to those who read a head."""
    users, after = list(product.users), product.next
    wide = casting.cast(product, torch.float32, after, within=False)
    with casting.graph.inserting_before(after):
        whole = _times(casting, wide, Scaled(1 / HEAD_SCALE, 1.0), product)
    whole.meta["val"] = like(wide.meta["val"], torch.float32)
    for user in users:
        user.replace_input_with(product, whole)


def _times(casting: Casting, source: Node, scaled: Scaled, beside: Node) -> Node:
    made = casting.graph.call_function(scaled, (source,))
    value: Any = casting.captured.get(source, source.meta["val"])
    describe(made, source, like(value, torch.float32), beside)
    casting.place(made, beside)
    return made
