"""Find feed-forward spans in a graph: rows go in, are made wide, and come out of a product, each by itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from passes.chunked_span import ChunkedSpan
from passes.nodes import called_path, made_bytes
from passes.pieces import Piece, erase_unused, product_weights, replace_nodes
from passes.position_wise import UNKNOWN, data_inputs, is_product, told, why_not
from rewrite import RECOMPUTE, Refusal

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite import Region

BEGINS = "begins here"
USED_OUTSIDE = "is also used outside of the span"


@dataclass
class FeedForward:
    """One span of one region: every node of `inside` works on rows of `entry`, and `last` is a product."""

    region: Region
    entry: Node
    inside: list[Node]
    """In graph order, `last` not among them."""
    last: Node

    @property
    def path(self) -> str:
        """Path of the innermost module around the whole span, of the region's first instance."""
        paths = [_path(self.region, node).split(".") for node in (*self.inside, self.last)]
        shared = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
        return ".".join(shared)

    @property
    def inside_bytes(self) -> int:
        """Of the values made inside, for the example inputs."""
        return sum(made_bytes(node) for node in self.inside)

    @property
    def entry_bytes(self) -> int:
        return made_bytes(self.entry)


def _path(region: Region, node: Node) -> str:
    return called_path(region, node) if node.op == "call_module" else str(node.meta.get("module_path", region.path))


def find_feed_forwards(region: Region) -> Iterator[tuple[Node, FeedForward | Refusal]]:
    """The product that ends it and the span, the last of the graph first, or what alone keeps it from being one."""
    taken: set[Node] = set()
    for node in reversed(list(region.nodes())):
        if node in taken or not is_product(region, node) or node.meta.get("hooked"):
            continue
        found = _Growth(region, node, taken).grow()
        if isinstance(found, FeedForward):
            taken |= {*found.inside, found.last}
        if found is not None:
            yield node, found


class _Growth:
    """From a product back over position-wise nodes, as long as they are used within the span alone."""

    def __init__(self, region: Region, last: Node, taken: set[Node]) -> None:
        self.region, self.last, self.taken = region, last, taken
        self.order = {node: place for place, node in enumerate(region.nodes())}
        self.inside: set[Node] = set()

    def grow(self) -> FeedForward | Refusal | None:
        """The span, or what stands in the way of one; None where nothing is made wide."""
        best: FeedForward | None = None
        open_ = self._sources([self.last])
        while open_:
            node = max(open_, key=self.order.__getitem__)
            if len(open_) == 1 and self._is_wide(node):
                best = FeedForward(self.region, node, sorted(self.inside, key=self.order.__getitem__), self.last)
            if best is not None and is_product(self.region, node):
                break  # another wide value begins here, for a span of its own
            reason = self._reason(node)
            if reason:
                return best or self._refusal(node, reason)
            self.inside.add(node)
            open_ = self._sources([self.last, *self.inside])
        return best

    def _sources(self, nodes: list[Node]) -> list[Node]:
        found = dict.fromkeys(source for node in nodes for source in data_inputs(node))
        return [source for source in found if source not in self.inside]

    def _is_wide(self, entry: Node) -> bool:
        """Whether a product inside makes rows wider than the entry's."""
        widths = [_width(node) for node in self.inside if is_product(self.region, node)]
        return bool(widths) and max(widths) > _width(entry)

    def _reason(self, node: Node) -> str:
        if node in self.taken or node.op in ("placeholder", "output", "get_attr"):
            return BEGINS
        if node.meta.get(RECOMPUTE) != self.last.meta.get(RECOMPUTE):
            return "is recomputed apart from the product that follows"
        reason = why_not(self.region, node)
        if not reason and any(user is not self.last and user not in self.inside for user in node.users):
            return USED_OUTSIDE
        return reason

    def _refusal(self, node: Node, reason: str) -> Refusal | None:
        """A sentence, if but for this node a wide value would come into the last product."""
        widest_in = max((_width(source) for source in data_inputs(self.last)), default=0)
        if reason in (BEGINS, USED_OUTSIDE) or widest_in <= _width(self.last):
            return None
        between, widest = self._before(node)
        widest = max([widest, *(_width(each) for each in self.inside if is_product(self.region, each))])
        if widest <= _width(self.last):
            return None
        reasons = {other: why_not(self.region, other) for other in between}
        known = [other for other in between if reasons[other] not in ("", UNKNOWN)]
        culprit = max(known, key=self.order.__getitem__, default=node)
        ends = f"so the span cannot be cut before {told(self.region, self.last)}"
        text = f"{told(self.region, culprit)} {reasons.get(culprit) or reason}, {ends}"
        return Refusal(_path(self.region, self.last), text, str(culprit.meta.get("source", "")))

    def _before(self, node: Node) -> tuple[set[Node], int]:
        """What lies between a node and the nearest products before it, and how wide those make their rows.

        The width is 0 where none of them widens them.
        """
        seen: set[Node] = set()
        open_, widest = [node], 0
        while open_:
            here = open_.pop()
            if here in seen or here.op in ("placeholder", "get_attr"):
                continue
            if here is not node and is_product(self.region, here):
                if any(_width(source) < _width(here) for source in data_inputs(here)):
                    widest = max(widest, _width(here))
                continue
            seen.add(here)
            open_ += list(data_inputs(here))
        return seen, widest


def _width(node: Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dim():
        return 0
    size: Any = value.shape[-1]
    return size if isinstance(size, int) else 0


def replace_span(span: FeedForward, chunks: int) -> str:
    """Put one node in place of a span; returns its name."""
    region, last = span.region, span.last
    replaced = [*span.inside, last]
    weights = product_weights(region, last, last)
    piece = Piece(region, span.entry, span.inside if weights else replaced)
    modules, tensors = piece.arguments(last)
    weight, bias, transposed = weights or (None, None, False)
    with region.graph.inserting_before(last):
        target = ChunkedSpan(chunks, piece, transposed)
        made = region.graph.call_function(target, (span.entry, weight, bias, modules, tensors))
    replace_nodes(region, made, replaced, last)
    if RECOMPUTE in last.meta:
        made.meta[RECOMPUTE] = last.meta[RECOMPUTE]
    last.replace_all_uses_with(made)
    erase_unused(region, replaced)
    return made.name
