"""Values that a backward computes twice rather than hold: what else each point of a curve can be.

A backward that recomputes a block runs it through before it can use the last of its values, and holds those it will use
later. One that is cheap to run again from what is held anyway need not be among them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from rewrite.plan.curve import Point
from rewrite.plan.price import STEP_SECONDS
from rewrite.plan.profile import NodeProfile, Profile


def releasing(profile: Profile, point: Point) -> Iterator[Point]:
    """The point with every cheap value released that may be, then for each dear one with it and what is made from it.

    Cheap is what does no matrix work.
    """
    made = {node.name: node for node in profile.nodes}
    read = {source for name in point.again for source in made[name].sources}
    lingering = [node for node in profile.nodes if node.name in read and _may_go(node, point)]
    dear = {node.name for node in lingering if any(work.flops for work in profile.efforts[node.name].work)}
    for first in (None, *sorted(dear)):
        if first is not None and not _from_held(made[first], made, point, ()):
            continue
        chosen = [] if first is None else [first]
        for node in lingering:
            if node.name not in dear and _from_held(node, made, point, set(chosen) - {first}):
                chosen.append(node.name)
        if chosen:
            seconds = sum(STEP_SECONDS + _seconds(made[name], point) for name in chosen)
            yield replace(point, seconds=point.seconds + seconds, release=frozenset(chosen))


def _may_go(node: NodeProfile, point: Point) -> bool:
    """Whether a value that is made on the way to others is read after them, by the backward itself."""
    return node.name in point.again and node.needed and (not node.state_bytes or node.name in point.keep_state)


def _from_held(
    node: NodeProfile, made: Mapping[str, NodeProfile], point: Point, released: Collection[str | None]
) -> bool:
    """Whether what it is made from is there when the backward reads it: that is read later still, or kept."""
    sources = [made[source] for source in node.sources if source in made and source != node.name]
    return all(each.name in point.keep or (each.needed and each.name not in released) for each in sources)


def _seconds(node: NodeProfile, point: Point) -> float:
    return node.masked_seconds if node.mask_bytes is not None and node.name in point.keep_state else node.seconds
