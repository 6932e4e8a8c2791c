"""Put one node in place of a head and its loss, and one for logits that the model returns."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from passes.chunked_loss import AgainLoss, AheadLoss, CrossEntropy, Span
from passes.nodes import function_name
from passes.pieces import Piece, attribute, erase_unused, product_weights, replace_nodes
from passes.position_wise import CASTS
from rewrite import Change, defer, dropped

if TYPE_CHECKING:
    from torch.fx import Node

    from passes.heads import Head


def rewrite_head(head: Head, chunks: int, logits: str) -> Change:
    """Replace the nodes of `head`; `logits` as in `ChunkLoss`."""
    graph = head.region.graph
    replaced = [*head.body, *head.shape, head.loss]
    with graph.inserting_before(head.loss):
        hidden = _shifted(head)
        weight = head.class_weight
        if isinstance(weight, str):
            weight = attribute(head.region, weight, head.loss)
        loss = CrossEntropy(**head.options)
        made = _ahead(head, chunks, loss, hidden, weight) or _again(head, chunks, loss, hidden, weight)
        replace_nodes(head.region, made, replaced, head.loss)
        for node in head.returned if logits != "keep" else ():
            _return_logits(head, node, logits)
    head.loss.replace_all_uses_with(made)
    erase_unused(head.region, replaced)
    told = {"keep": ", logits kept", "drop": ", logits dropped"}.get(logits, ", logits computed when they are read")
    summary = f"head and loss in {chunks} chunks{told if head.returned else ''}"
    names = [made.name, *(node.name for node in replaced)]
    return Change(head.path, summary, head.region.instances, tuple(names))


def _shifted(head: Head) -> Node:
    """The hidden states of the positions that have a label."""
    node = head.hidden
    for shift in head.shifts:
        made = head.region.graph.call_function(operator.getitem, (node, shift.args[1]))
        replace_nodes(head.region, made, [shift], shift)
        index = fx.map_arg(shift.args[1], lambda part: part.meta.get("val"))
        with node.meta["val"].fake_mode:
            made.meta["val"] = node.meta["val"][index]
        node = made
    return node


def _ahead(head: Head, chunks: int, loss: CrossEntropy, hidden: Node, class_weight: Any) -> Node | None:
    """A node that computes gradients in the forward, if head and loss allow it."""
    if head.linear is None or loss.reduction == "none":
        return None
    first, tail = head.linear
    weights = product_weights(head.region, first, head.loss)
    if weights is None:
        return None
    weight, bias, transposed = weights
    if transposed:
        weight = _turned(head, weight)
    piece = None if _only_widens(tail) else Piece(head.region, first, tail)
    more = piece.arguments(head.loss)[1] if piece else []
    span = None if piece is None else _tail_function(piece)
    target = AheadLoss(chunks, loss, span, head.loss.meta["val"].dtype)
    return head.region.graph.call_function(target, (hidden, head.labels, weight, bias, class_weight, more))


def _turned(head: Head, matrix: Node) -> Node:
    """A node that gives a matrix transposed."""
    turned = head.region.graph.call_function(torch.t, (matrix,))
    replace_nodes(head.region, turned, [], matrix)
    with matrix.meta["val"].fake_mode:
        turned.meta["val"] = matrix.meta["val"].t()
    return turned


def _only_widens(tail: Sequence[Node]) -> bool:
    """Whether nothing but casts to single precision or better follows the product: the loss computes in that anyway."""
    return all(
        function_name(node) in CASTS and node.meta["val"].dtype in (torch.float32, torch.float64) for node in tail
    )


def _tail_function(piece: Piece) -> Span:
    run = piece.function()
    return lambda logits, *more: run(logits, (), more)


def _again(head: Head, chunks: int, loss: CrossEntropy, hidden: Node, class_weight: Any) -> Node:
    """A node that computes each chunk again in the backward."""
    piece = Piece(head.region, head.hidden, head.body)
    modules, tensors = piece.arguments(head.loss)
    target = AgainLoss(chunks, loss, piece.function(), head.loss.meta["val"].dtype)
    return head.region.graph.call_function(target, (hidden, head.labels, class_weight, modules, tensors))


def _return_logits(head: Head, node: Node, logits: str) -> None:
    """Give the region's output something else in place of the logits that `node` makes."""
    graph = head.region.graph
    classes, dtype = int(node.meta["val"].shape[-1]), node.meta["val"].dtype
    if logits == "drop":
        made = graph.call_function(DroppedLogits(classes, dtype), (head.hidden,))
    else:
        body = head.body[: head.body.index(node) + 1]
        piece = Piece(head.region, head.hidden, body)
        modules, tensors = piece.arguments(head.loss)
        made = graph.call_function(DeferredLogits(piece.function(), classes, dtype), (head.hidden, modules, tensors))
    replace_nodes(head.region, made, [node], node)
    for user in list(node.users):
        if user.op == "output":
            user.replace_input_with(node, made)


class DeferredLogits:
    """Logits of all rows, computed when they are read."""

    __module__ = "passes.losses"

    def __init__(self, run: Callable[..., torch.Tensor], classes: int, dtype: torch.dtype) -> None:
        self.run, self.classes, self.dtype = run, classes, dtype
        self.__name__ = self.__qualname__ = "deferred_logits"

    def __call__(self, hidden: torch.Tensor, modules: Sequence[Any], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        run = self.run
        shape = (*hidden.shape[:-1], self.classes)
        return defer(
            lambda rows, *given: run(rows, modules, given), (hidden, *tensors), shape, self.dtype, name="logits"
        )


class DroppedLogits:
    """Stands for logits that nobody may read."""

    __module__ = "passes.losses"

    def __init__(self, classes: int, dtype: torch.dtype) -> None:
        self.classes, self.dtype = classes, dtype
        self.__name__ = self.__qualname__ = "dropped_logits"

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = (*hidden.shape[:-1], self.classes)
        next_step = "leave out logits=drop to have them computed when they are read"
        return dropped(shape, self.dtype, hidden.device, name="logits", next_step=next_step)
