"""When values were made, and whether layers ran between: the backward goes through those in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from passes.frozen_part import needs_grad
from passes.nodes import function_name, made_bytes, storages

if TYPE_CHECKING:
    from torch.fx import Node

    from passes.callers import Callers
    from rewrite import Region


class Makers:
    """Compares values of a program by the nodes whose backward reads their gradients."""

    def __init__(self, callers: Callers) -> None:
        self.callers = callers
        self._orders: dict[int, dict[Node, int]] = {}

    def last(self, region: Region, values: Sequence[Node]) -> Node:
        """The value whose maker stands last; among inputs of the region, the one made last for its first call."""
        order = self._order(region)
        makers = [maker_of(value) for value in values]
        latest = max(range(len(values)), key=lambda place: order[makers[place]])
        calls = self.callers.of(region) if makers[latest].op == "placeholder" else []
        if not calls:
            return values[latest]
        given = [calls[0].given[maker] for maker in makers]
        return values[given.index(self.last(calls[0].region, given))]

    def waits(self, region: Region, early: Node, late: Node, joined: Node) -> bool:
        """Whether a gradient that `joined` hands out to `early` waits there while layers that lead to `late` run.

        It is added to the gradient of a use after `joined`, which is there already, or waits for that of a use before.
        """
        order = self._order(region)
        first, second = maker_of(early), maker_of(late)
        others = [use for use in _uses(first) if use is not joined]
        if first is second or any(order[use] > order[joined] for use in others):
            return False
        start = max([order[first], *(order[use] - _is_block(use) for use in others)])
        called = late is joined  # the layers inside before the other part have been looked at
        end = order[joined] if called else order[second] + _is_block(second)
        if self._has_layer(region, start, end):
            return True
        if first.op != "placeholder" or others:
            return False
        inside = called or second.op != "placeholder"
        return any(
            self.waits(call.region, call.given[first], call.node if inside else call.given[second], call.node)
            for call in self.callers.of(region)
        )

    def _has_layer(self, region: Region, start: int, end: int) -> bool:
        """Whether a layer with weights stands between two places."""
        return any(start < place < end and _has_weights(region, node) for node, place in self._order(region).items())

    def _order(self, region: Region) -> dict[Node, int]:
        return self._orders.setdefault(id(region.graph), {node: place for place, node in enumerate(region.nodes())})


def maker_of(node: Node) -> Node:
    """The node whose backward reads the gradient: behind those that only view what they are given."""
    while node.op in ("call_function", "call_method") and not node.meta.get("writes"):
        given = [source for source in node.all_input_nodes if storages([source]) & storages([node])]
        if len(given) != 1 or made_bytes(given[0]) != made_bytes(node):
            break
        node = given[0]
    return node


def _uses(node: Node) -> Iterator[Node]:
    """The nodes that send a gradient to what a node gives, or to a view of it."""
    for user in node.users:
        if maker_of(user) is maker_of(node):
            yield from _uses(user)
        elif user.op == "output" or needs_grad(user):
            yield user


def _is_block(node: Node) -> bool:
    """Whether layers may run within a node, after it has used what it is given and before it gives a value."""
    return bool(node.meta.get("block"))


def _has_weights(region: Region, node: Node) -> bool:
    """Whether a node calls a layer, or a block, with weights, or the function that stands for one."""
    if node.op != "call_module":
        return function_name(node).startswith(("conv", "linear"))
    return any(True for _ in region.called(node).parameters())
