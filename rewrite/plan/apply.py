"""Tag a program with what its pieces are to keep."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from rewrite.plan.curve import EACH, Point
from rewrite.plan.settled import Spot
from rewrite.plan.tagging import tag
from rewrite.program import Program, Region
from rewrite.tags import PASSING, RECOMPUTE, RELEASE


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
    passing: bool = False
    """Whether the nodes are calls of blocks, and what is not kept is what passes between these."""


Parts = tuple[tuple[tuple[str, ...], frozenset[str], Point], ...]
"""For each planned piece of an instance: its nodes, those that run once, and what it keeps."""


def apply_points(
    program: Program, spots: Sequence[Spot], points: Sequence[Point | None]
) -> tuple[Program, tuple[Kept, ...]]:
    """`program`, which may be changed, with the piece at each spot tagged to keep what its point says; None leaves it.

    Instances of a region that keep different things get graphs of their own.
    """
    around = [(program.regions[number], becomes) for number, becomes in groups_of(spots, points)]
    parts: dict[tuple[int, str], Parts] = {}
    for spot, point in zip(spots, [point and replace(point, passing="") for point in points], strict=True):
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
    passing = [tag_passing(program.left_of(region), becomes) for region, becomes in around]
    return program, (*kept, *filter(None, passing))


def groups_of(spots: Sequence[Spot], points: Sequence[Point | None]) -> list[tuple[int, dict[str, str]]]:
    """Pieces in a row between which nothing is held: the number of the region they are in, or are called from, and for
    each node there what becomes of what is made, `ONCE` or `EACH`; "" for the last piece."""
    groups: list[tuple[int, dict[str, str]]] = []
    before: tuple[str, ...] = ()
    for spot, point in zip(spots, points, strict=True):
        if not spot.computes:
            continue
        region, names = spot.around
        if point is not None and point.passing:
            if not groups or groups[-1][0] != region or not groups[-1][1].keys() >= {*before}:
                groups.append((region, {}))
            groups[-1][1].update({**dict.fromkeys(before, point.passing), **dict.fromkeys(names, "")})
        before = names
    return groups


def tag_passing(region: Region, becomes: Mapping[str, str]) -> Kept | None:
    """Tag the nodes of a group, and what is between them; nothing if one has got hooks, which fire once."""
    tagged: dict[fx.Node, None] = {}
    nodes = [node for node in region.graph.nodes if node.op.startswith("call")]
    for place, node in enumerate(nodes):
        if node.name in becomes:
            tagged |= dict.fromkeys((*_between(nodes[: place + 1], tagged), node))
    if any(node.meta.get("hooked") for node in tagged):
        return None
    segment = max(region.segments(), default=-1) + 1
    for node in tagged:
        node.meta |= {RECOMPUTE: segment, PASSING: True}
        if becomes.get(node.name) == EACH:
            node.meta[RELEASE] = True
    again = tuple(node.name for node in tagged if becomes.get(node.name))
    each = tuple(name for name in again if becomes[name] == EACH)
    return Kept(region.path, region.instances, (), (), again, each, tuple(node.name for node in tagged), passing=True)


def _between(nodes: Sequence[fx.Node], before: Collection[fx.Node]) -> list[fx.Node]:
    """Of `nodes`, those by which what `before` makes comes to the last of them."""
    derived, needed = {*before}, {nodes[-1]}
    for node in nodes:
        if not derived.isdisjoint(node.all_input_nodes):
            derived.add(node)
    for node in reversed(nodes):
        if not needed.isdisjoint(node.users):
            needed.add(node)
    return [node for node in nodes[:-1] if node in derived & needed and node not in before]


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
