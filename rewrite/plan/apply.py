"""Tag a program with what its pieces are to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rewrite.plan.curve import Point
from rewrite.plan.settled import Spot
from rewrite.plan.tagging import tag
from rewrite.program import Program, Region


@dataclass(frozen=True)
class Kept:
    """What several instances of a region keep in common; what they do not is computed again."""

    path: str
    """Module path of the first of them."""
    instances: tuple[str, ...]
    keep: tuple[str, ...]
    """Names of the nodes whose value is kept."""
    keep_state: tuple[str, ...]
    """Names of those of which is kept what the operator saves for itself."""
    again: tuple[str, ...]
    """Names of those that the backward runs again."""
    release: tuple[str, ...]
    """Names of those of them whose value goes after its first run, so that they run twice."""
    tagged: tuple[str, ...]
    """Names of all the nodes in recompute segments."""


Parts = tuple[tuple[tuple[str, ...], frozenset[str], Point], ...]
"""For each planned piece of an instance: its nodes, those that run once, and what it keeps."""


def apply_points(
    program: Program, spots: Sequence[Spot], points: Sequence[Point | None]
) -> tuple[Program, tuple[Kept, ...]]:
    """`program`, which may be changed, with the piece at each spot tagged to keep what its point says; None leaves it.

    Instances of a region that keep different things get graphs of their own.
    """
    parts: dict[tuple[int, str], Parts] = {}
    for spot, point in zip(spots, points, strict=True):
        place = spot.region, spot.instance
        known = parts.get(place, ())
        if point is not None and all(names != spot.names for names, _, _ in known):
            parts[place] = (*known, (spot.names, spot.once, point))
    kept: list[Kept] = []
    for number, region in enumerate(program.regions):
        groups: dict[Parts, list[str]] = {}
        for instance in region.instances:
            if (number, instance) in parts:
                groups.setdefault(parts[number, instance], []).append(instance)
        for group, instances in groups.items():
            program, taken = program.split(program.left_of(region), tuple(instances))
            kept.append(_tag(taken, group))
    return program, tuple(kept)


def _tag(region: Region, group: Parts) -> Kept:
    segment, keep, state, tagged = 0, list[str](), list[str](), list[str]()
    again, release = list[str](), list[str]()
    for names, once, point in group:
        segment = tag(region.graph.nodes, frozenset(names), point, segment, once)
        keep += sorted(point.keep)
        state += sorted(point.keep_state)
        again += sorted(point.again)
        release += sorted(point.release)
        tagged += names
    return Kept(region.path, region.instances, tuple(keep), tuple(state), tuple(again), tuple(release), tuple(tagged))
