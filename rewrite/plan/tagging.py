"""From a choice of what to keep to the tags that say so."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import fx

from rewrite.plan.curve import Point
from rewrite.plan.rerun import changes_mode, is_effect
from rewrite.program import value_tensors
from rewrite.tags import KEEP, KEEP_STATE, RECOMPUTE, RELEASE, WITHIN


def tag(nodes: Iterable[fx.Node], names: Collection[str], point: Point, segment: int, once: Collection[str]) -> int:
    """Tag those of a graph's `nodes` that are in `names`, as segments from number `segment` on; the next free number.

    What must not run twice (`once`, and what brings Python objects up to date) stays outside and ends a segment.
    """
    tagged = False
    for node in nodes:
        if node.op in ("placeholder", "output", "get_attr") or WITHIN in node.meta:
            continue
        if node.name not in names or node.name in once or is_effect(node) or node.meta.get("object"):
            if tagged and _stands_between(node):
                segment, tagged = segment + 1, False
            continue
        tagged = True
        node.meta[RECOMPUTE] = segment
        if node.name in point.keep:
            node.meta[KEEP] = True
        if node.name in point.keep_state:
            node.meta[KEEP_STATE] = True
        if node.name in point.release:
            node.meta[RELEASE] = True
    return segment + 1 if tagged else segment


def _stands_between(node: fx.Node) -> bool:
    computes = node.op == "call_module" or bool(value_tensors(node.meta.get("val")))
    return computes or is_effect(node) or changes_mode(node) != 0
