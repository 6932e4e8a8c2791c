"""Find concatenations whose joint gradient waits for the maker of an early part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from passes.callers import Callers
from passes.fake_values import describe
from passes.frozen_part import needs_grad
from passes.gradient_layout import joins_channels, why_layout_matters
from passes.makers import Makers
from passes.nodes import made_bytes, storages
from passes.own_gradient import own_gradient
from passes.position_wise import told
from rewrite import Refusal

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite import Program, Region

JOINING = (torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack, torch.dstack)


@dataclass(frozen=True)
class Concatenation:
    """A call whose gradient is one tensor, of which each part is handed a view."""

    region: Region
    node: Node
    waiting: tuple[int, ...]
    """Which of its parts wait, and keep the joint gradient alive, while layers made after them run their backward."""

    @property
    def parts(self) -> Sequence[Node]:
        return _parts(self.node)

    @property
    def path(self) -> str:
        """Module path of the first instance."""
        return str(self.node.meta.get("module_path", self.region.path))

    @property
    def copied_bytes(self) -> int:
        """What the gradients of the parts that wait take, for the example inputs."""
        return sum(made_bytes(self.parts[place]) for place in self.waiting)

    @property
    def freed_bytes(self) -> int:
        """What of the joint gradient goes as soon as the part that was made last is through with it."""
        return made_bytes(self.node) - self.copied_bytes


def find_concatenations(program: Program) -> Iterator[Concatenation | Refusal]:
    """Those with a part that waits, and reasons to leave such a part alone."""
    callers = Callers(program)
    makers = Makers(callers)
    for region in program.regions:
        for node in region.nodes():
            parts = _parts(node) if needs_grad(node) else ()
            flowing = [place for place, part in enumerate(parts) if needs_grad(part)]
            if len(flowing) > 1:
                yield from _examined(callers, makers, region, node, flowing)


def _examined(
    callers: Callers, makers: Makers, region: Region, node: Node, flowing: Sequence[int]
) -> Iterator[Concatenation | Refusal]:
    parts = _parts(node)
    last = makers.last(region, [parts[place] for place in flowing])
    held = storages([last])
    waiting = []
    for place in flowing:
        part = parts[place]
        if part.target is own_gradient or storages([part]) & held or not makers.waits(region, part, last, node):
            continue
        culprit = why_layout_matters(callers, region, part, by_channels=joins_channels(node))
        if culprit:
            reason = (
                f"part {place} of {told(region, node)} waits in the backward, but {culprit} may add up its gradient in "
                "another order where that is a copy; it is left a part of the joint gradient"
            )
            yield Refusal(str(node.meta.get("module_path", region.path)), reason, str(node.meta.get("source", "")))
        else:
            waiting.append(place)
    if waiting:
        found = Concatenation(region, node, tuple(waiting))
        yield found if found.copied_bytes <= found.freed_bytes else _no_gain(found)


def _no_gain(found: Concatenation) -> Refusal:
    node = found.node
    reason = (
        f"{told(found.region, node)} joins parts whose gradients wait and take {found.copied_bytes:,} bytes: copies of "
        f"them, beside the joint gradient at first, would let no more than {found.freed_bytes:,} bytes of it go early"
    )
    return Refusal(found.path, reason, str(node.meta.get("source", "")))


def split_gradients(found: Concatenation) -> list[str]:
    """Put an identity on each part that waits; returns their names.

    The backward runs them last made first: made in turn from the last part to the first, they hand on gradients in the
    order in which the concatenation did, so that a tensor which is several parts adds up its gradients alike.
    """
    node, parts = found.node, list(found.parts)
    for place in reversed(found.waiting):
        part = parts[place]
        with found.region.graph.inserting_before(node):
            parts[place] = found.region.graph.call_function(own_gradient, (part,))
        describe(parts[place], part, part.meta["val"], node)
    if node.args:
        node.args = (parts, *node.args[1:])
    else:
        node.kwargs = {**node.kwargs, "tensors": parts}
    return [parts[place].name for place in found.waiting]


def _parts(node: Node) -> Sequence[Node]:
    """What a call joins; nothing for another call."""
    if node.op != "call_function" or node.target not in JOINING or node.kwargs.get("out") is not None:
        return ()
    parts: Any = node.args[0] if node.args else node.kwargs.get("tensors")
    if not isinstance(parts, (tuple, list)) or not all(hasattr(part, "meta") for part in parts):
        return ()
    return parts
