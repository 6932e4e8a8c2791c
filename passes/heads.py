"""Find head and cross-entropy in a graph: rows of hidden states -> logits -> pointwise tail -> shift -> loss."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.nn import functional

from passes.nodes import function_name
from passes.position_wise import CASTS, data_inputs, is_product, told, why_not
from rewrite import Refusal

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite import Region

RESHAPES = frozenset({"view", "reshape", "flatten", "contiguous", "transpose", "permute", "squeeze", "movedim", "mT"})
"""What may stand between logits and loss and changes no value: where the classes go is followed by the shapes."""
MODES = ("set_grad_enabled", "enter_autocast", "exit_autocast")


@dataclass
class Head:
    """One head and its loss, all of one region."""

    region: Region
    loss: Node
    labels: Any
    class_weight: Any
    options: dict[str, Any]
    """`ignore_index`, `reduction` and `label_smoothing`."""
    hidden: Node
    """Rows of this, of the last dimension, go into the head."""
    body: list[Node]
    """From the hidden states to the scores, in graph order: every node works on rows."""
    shape: list[Node]
    """Nodes after the body that change no value."""
    shifts: list[Node]
    """Of those, what takes a part of the positions, in graph order."""
    returned: list[Node] = field(default_factory=list)
    """Nodes of the body whose value the region gives back."""

    @property
    def path(self) -> str:
        return self.region.path or str(self.loss.meta.get("module_path", ""))

    @property
    def scores(self) -> Node:
        return self.body[-1]

    @property
    def classes(self) -> int:
        return int(self.scores.meta["val"].shape[-1])

    @property
    def width(self) -> int:
        return int(self.hidden.meta["val"].shape[-1])

    @property
    def rows(self) -> int:
        """Positions that have a label, for the example inputs."""
        count = self.labels.meta["val"].numel()
        return int(getattr(getattr(count, "node", None), "hint", count))

    @property
    def logits_itemsize(self) -> int:
        return int(self.body[0].meta["val"].element_size())

    @property
    def loss_itemsize(self) -> int:
        return int(self.loss.meta["val"].element_size())

    @property
    def linear(self) -> tuple[Node, list[Node]] | None:
        """The one product that makes the logits, and the pointwise nodes after it; None for another kind of head."""
        first, *tail = self.body
        apart = any(is_product(self.region, node) or self.hidden in node.all_input_nodes for node in tail)
        return (first, tail) if _is_linear(self.region, first) and not apart else None


def find_heads(region: Region) -> Iterator[Head | Refusal]:
    """Each cross-entropy of the graph, as a head that can be chunked or with the reason why not."""
    for node in region.nodes():
        if function_name(node) == "cross_entropy" and node.op == "call_function":
            arguments = _bound(*node.args, **node.kwargs)
        elif node.op == "call_module" and type(region.called(node)) is nn.CrossEntropyLoss:
            arguments = _bound_module(region, node)
        else:
            continue
        yield _head(region, node, arguments)


def _bound(*args: Any, **kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(functional.cross_entropy).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _bound_module(region: Region, node: Node) -> dict[str, Any]:
    module = region.called(node)
    assert isinstance(module, nn.CrossEntropyLoss)
    weight = None if module.weight is None else f"{node.target}.weight"
    options = {name: getattr(module, name) for name in ("ignore_index", "reduction", "label_smoothing")}
    return {**_bound(*node.args, **node.kwargs), "weight": weight, **options}


def _head(region: Region, loss: Node, arguments: dict[str, Any]) -> Head | Refusal:
    reason = _unfit(loss, arguments)
    if reason:
        return _refusal(region, loss, reason)
    walk = _Walk(region, loss, arguments["input"])
    reason = walk.back()
    if reason:
        return _refusal(region, loss, reason)
    options = {name: arguments[name] for name in ("ignore_index", "reduction", "label_smoothing")}
    head = Head(
        region, loss, arguments["target"], arguments["weight"], options,
        walk.hidden, walk.body, walk.shape, walk.shifts,
    )  # fmt: skip
    head.returned, reason = _returned(head)
    return _refusal(region, loss, reason) if reason else head


def _refusal(region: Region, loss: Node, reason: str) -> Refusal:
    path = str(loss.meta.get("module_path", region.path))
    return Refusal(path, reason, loss.meta.get("source", ""))


def _unfit(loss: Node, arguments: dict[str, Any]) -> str:
    """What about the loss itself does not fit."""
    target = arguments["target"]
    if arguments["size_average"] is not None or arguments["reduce"] is not None:
        return "the loss uses size_average or reduce, which torch has deprecated; use reduction="
    if not isinstance(target, fx.Node) or target.meta["val"].is_floating_point():
        return "the targets are probabilities, one for each class and row; give class numbers to have it chunked"
    if loss.meta["val"].dim() and arguments["reduction"] != "none":
        return "the loss is not one number"
    if loss.meta.get("recompute") is not None:
        return "the loss is recomputed already; put chunk-loss before checkpoint"
    return ""


class _Walk:
    """From the loss back to the hidden states."""

    def __init__(self, region: Region, loss: Node, scores: Node) -> None:
        self.region, self.loss, self.scores = region, loss, scores
        self.shape: list[Node] = []
        self.shifts: list[Node] = []
        self.body: list[Node] = []
        self.hidden: Any = None

    def back(self) -> str:
        """Fill in; returns the reason if it cannot be."""
        node: Any = self.scores
        axis = 1 if node.meta["val"].dim() > 1 else 0
        if axis == 0:
            return "the loss is that of a single position"
        classes = node.meta["val"].shape[axis]
        if isinstance(classes, torch.SymInt):
            return "the number of classes varies from call to call"
        while True:
            step = self._shape_step(node, axis)
            if step is None:
                break
            node, axis = step
        if axis != node.meta["val"].dim() - 1:
            return f"the classes are not the last dimension of the scores that {told(self.region, node)} gives"
        return self._body(node) or self._undisturbed()

    def _shape_step(self, node: Node, axis: int) -> tuple[Node, int] | None:
        """One node back, through one that moves values without changing them; pointwise nodes before a shift too."""
        name = function_name(node)
        source: Any = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or node.op == "call_module" or self._is_returned(node, axis):
            return None
        if name in RESHAPES:
            before = _axis_before(node, source, axis)
            if before is None:
                return None
            self.shape.insert(0, node)
            return source, before
        if name == "getitem" and axis == node.meta["val"].dim() - 1 and _leaves_last(node, source):
            self.shape.insert(0, node)
            self.shifts.insert(0, node)
            return source, source.meta["val"].dim() - 1
        if name in CASTS and self._feeds_shift(source):
            self.shape.insert(0, node)
            return source, axis
        return None

    def _is_returned(self, node: Node, axis: int) -> bool:
        """Whether the region gives this back, and the head ends here."""
        returned = any(user.op == "output" for user in node.users)
        return returned and axis == node.meta["val"].dim() - 1 and not why_not(self.region, node)

    def _feeds_shift(self, source: Node) -> bool:
        """Whether a cast stands between the head and shape changes rather than at the head's end."""
        return function_name(source) in RESHAPES or function_name(source) == "getitem"

    def _body(self, scores: Node) -> str:
        """The least run of position-wise nodes that makes the scores from one value by way of a product."""
        region = self.region
        inside: set[Node] = set()
        open_: list[Node] = [scores]
        order = {node: place for place, node in enumerate(region.nodes())}
        while True:
            node = max(open_, key=order.__getitem__)
            if len(open_) == 1 and self._has_product(inside):
                break
            reason = why_not(region, node)
            if reason:
                return f"the scores do not come from rows of hidden states alone: {told(region, node)} {reason}"
            if not self._used_inside(node, inside, scores):
                return f"{told(region, node)} is also used elsewhere than in the loss"
            inside.add(node)
            open_ = [other for other in open_ if other is not node]
            open_ += [source for source in data_inputs(node) if source not in open_ and source not in inside]
            if not open_:
                return "the scores depend on no input"
        self.hidden = node
        self.body = sorted(inside, key=order.__getitem__)
        return ""

    def _has_product(self, inside: set[Node]) -> bool:
        return any(is_product(self.region, node) for node in inside)

    def _used_inside(self, node: Node, inside: set[Node], scores: Node) -> bool:
        allowed = inside | set(self.shape) | {self.loss}
        return all(user in allowed or user.op == "output" for user in node.users)

    def _undisturbed(self) -> str:
        """Whether nothing between head and loss changes the modes they run in, or what they read."""
        nodes = list(self.region.nodes())
        between = nodes[nodes.index(self.body[0]) : nodes.index(self.loss)]
        mine = {self.hidden.name, *(node.name for node in (*self.body, *self.shape))}
        for node in between:
            if function_name(node) in MODES:
                return "a no_grad or autocast span begins or ends between the head and the loss"
            if mine & set(node.meta.get("writes", ())):
                return f"{told(self.region, node)} changes the logits, or what they come from, in place"
        for node in self.shifts:
            if _rows(node.args[0]) != _rows(self.hidden):
                return f"{told(self.region, node)} picks positions of logits in another shape than the head gives them"
        for node in self.shape:
            if any(user not in self.shape and user is not self.loss for user in node.users):
                return f"the logits are also used elsewhere than in the loss, after {told(self.region, node)}"
        return ""


def _axis_before(node: Node, source: Node, axis: int) -> int | None:
    """Where the classes stood before a change of shape that keeps the order of the rows; None when it does not."""
    before, after = source.meta["val"], node.meta["val"]
    name = function_name(node)
    if name in ("transpose", "permute", "movedim", "mT"):
        return _moved(node, before.dim(), axis)
    last_before, last_after = before.dim() - 1, after.dim() - 1
    if axis == last_after and str(before.shape[-1]) == str(after.shape[-1]) and before.dim() and last_before:
        return int(last_before)
    if name == "contiguous":
        return axis
    return None


def _moved(node: Node, dims: int, axis: int) -> int | None:
    """Of a permutation: where the dimension at `axis` came from, if the others keep their order."""
    probe = torch.empty([2 + place for place in range(dims)], device="meta")
    arguments = [probe, *node.args[1:]]
    moved: torch.Tensor = getattr(probe, str(function_name(node)))(*arguments[1:], **node.kwargs)
    came_from = [int(size) - 2 for size in moved.shape]
    others = [place for index, place in enumerate(came_from) if index != axis]
    return came_from[axis] if others == sorted(others) else None


def _leaves_last(node: Node, source: Node) -> bool:
    """Whether an index is of slices and whole numbers, and takes all of the last dimension."""
    index: Any = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    dims = source.meta["val"].dim()
    if any(not isinstance(part, (slice, int)) and part is not Ellipsis for part in index):
        return False
    named = [part for part in index if part is not Ellipsis]
    if len(named) < dims and (Ellipsis not in index or index[-1] is Ellipsis):
        return True
    if Ellipsis in index and index[-1] is Ellipsis:
        return True
    last = index[-1]
    return isinstance(last, slice) and last == slice(None, None, None)


def _rows(node: Any) -> list[str]:
    """The sizes of all dimensions but the last, as they are written."""
    return [str(size) for size in node.meta["val"].shape[:-1]]


def _is_linear(region: Region, node: Node) -> bool:
    """Whether a node is a product with one matrix that is not wrapped in anything."""
    if node.op == "call_module":
        return type(region.called(node)) is nn.Linear
    return function_name(node) in ("linear", "matmul", "__matmul__") and is_product(region, node)


def _returned(head: Head) -> tuple[list[Node], str]:
    """Nodes of the body that the region gives back, and a reason if they are not simply the logits."""
    found = [node for node in head.body if any(user.op == "output" for user in node.users)]
    if any(user.op == "output" for node in head.shape for user in node.users):
        return [], "the region returns the logits in another shape than the head gives them"
    return found, ""
