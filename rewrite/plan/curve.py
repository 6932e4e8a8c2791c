"""What to keep of a block: the least recompute under a bound on kept bytes, solved exactly, and the whole trade-off.

For each value there is the choice to keep it, to compute it again, or (when nothing needs it) neither; for what an
operator saves for itself, to keep it or to run the operator again. A value that is computed again needs its sources
kept or computed again. The choices are 0/1 variables of a small integer program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from rewrite.plan.price import STEP_SECONDS
from rewrite.plan.profile import NodeProfile, Profile

POINTS = 12
"""Points of a curve: enough that the best of them is near any bound."""
GAP = 1e-6
"""Relative distance from the optimum at which a solve may stop."""
NODE_LIMIT = 20_000
"""Nodes of the search tree after which a solve ends with the best found: a bound that is the same on every machine."""


@dataclass(frozen=True)
class Point:
    """One choice for a graph, by node name."""

    keep: frozenset[str]
    """Nodes whose value is kept."""
    keep_state: frozenset[str]
    """Nodes of which is kept what their operator saves for itself."""
    again: frozenset[str]
    """Nodes that the backward runs again."""
    kept_bytes: int
    """Held from the forward to the backward, the graph's inputs and results left out."""
    seconds: float
    """Of what is computed again."""
    release: frozenset[str] = frozenset()
    """Of these, the nodes whose value is not held from their first run in a backward to the next use."""
    passing: str = ""
    """Of a block, what becomes of what the block before passes to it: held, or made again `ONCE` or for `EACH` use."""


ONCE, EACH = "once", "each"

NOTHING = Point(frozenset(), frozenset(), frozenset(), 0, 0.0)
"""The one choice for a graph that makes nothing."""


def curve(profile: Profile, points: int = POINTS) -> tuple[Point, ...]:
    """The trade-off from the fewest kept bytes to no recompute: bytes rise and seconds fall from point to point."""
    problem = _Problem(profile)
    if not problem.width:
        return (NOTHING,)
    least, most = problem.solve(None, least_bytes=True), problem.solve(None)
    assert least is not None
    assert most is not None
    bounds = [least.kept_bytes + (most.kept_bytes - least.kept_bytes) * step // points for step in range(1, points)]
    found = [least, most]
    if most.kept_bytes > least.kept_bytes:
        found += [point for bound in bounds if (point := problem.solve(bound)) is not None]
    return _undominated(found)


def solve(profile: Profile, limit_bytes: int | None) -> Point | None:
    """The choice with the least recompute that keeps at most `limit_bytes`; None when even the least is more."""
    problem = _Problem(profile)
    return problem.solve(limit_bytes) if problem.width else NOTHING


def _undominated(points: Sequence[Point]) -> tuple[Point, ...]:
    ordered = sorted(points, key=lambda point: (point.kept_bytes, point.seconds))
    best: list[Point] = []
    for point in ordered:
        if not best or point.seconds < best[-1].seconds - 1e-12:
            best.append(point)
    return tuple(best)


class _Problem:
    """The integer program of one graph.

    Variables, in order: for each node whether its value is kept, and whether it is run again; for each node with a
    large state whether the state is kept; for each dropout that has both whether it is run again from its mask.
    """

    def __init__(self, profile: Profile) -> None:
        self.nodes = profile.nodes
        self.count = len(self.nodes)
        self.place = {node.name: position for position, node in enumerate(self.nodes)}
        stateful = [node for node in self.nodes if node.state_bytes]
        self.state = {node.name: 2 * self.count + position for position, node in enumerate(stateful)}
        masked = [node for node in stateful if node.mask_bytes is not None]
        first = 2 * self.count + len(stateful)
        self.masked = {node.name: first + position for position, node in enumerate(masked)}
        self.width = first + len(masked)
        self.bytes = numpy.zeros(self.width)
        self.seconds = numpy.zeros(self.width)
        self.upper = numpy.ones(self.width)
        self.rows: list[dict[int, float]] = []
        self.least: list[float] = []
        for node in self.nodes:
            self._add(node)
        self.matrix = self._matrix()

    def kept(self, name: str) -> int:
        return self.place[name]

    def again(self, name: str) -> int:
        return self.count + self.place[name]

    def _add(self, node: NodeProfile) -> None:
        kept, again = self.kept(node.name), self.again(node.name)
        self.bytes[kept] = node.bytes
        self.bytes[again] = node.replay_bytes
        self.seconds[again] = node.seconds + STEP_SECONDS
        if node.fixed:
            self.upper[again] = 0
        if node.needed:
            self._at_least({kept: 1, again: 1}, 1)
        for source in node.sources:
            if source in self.place and source != node.name:
                self._at_least({self.kept(source): 1, self.again(source): 1, again: -1}, 0)
        state = self.state.get(node.name)
        if state is None:
            return
        self.bytes[state] = node.kept_state_bytes
        self.seconds[state] = node.mask_seconds
        self._at_least({state: 1, again: 1}, 1)
        masked = self.masked.get(node.name)
        if masked is None:
            return
        self.seconds[masked] = node.masked_seconds - node.seconds
        self.bytes[masked] = -node.replay_bytes
        self._at_least({state: 1, masked: -1}, 0)
        self._at_least({again: 1, masked: -1}, 0)

    def _at_least(self, row: dict[int, float], bound: float) -> None:
        self.rows.append(row)
        self.least.append(bound)

    def _matrix(self) -> Any:
        entries = [(row, column, value) for row, each in enumerate(self.rows) for column, value in each.items()]
        rows, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
        return csr_matrix((values, (rows, columns)), shape=(len(self.rows), self.width))

    def solve(self, limit_bytes: int | None, *, least_bytes: bool = False) -> Point | None:
        """Least seconds within `limit_bytes`, then least bytes; the other way round with `least_bytes`."""
        first, second = (self.bytes, self.seconds) if least_bytes else (self.seconds, self.bytes)
        scale = max(float(numpy.abs(first).sum()), 1e-30)
        tie = 1e-7 / max(float(numpy.abs(second).sum()), 1e-30)
        constraints = [LinearConstraint(self.matrix, numpy.array(self.least), numpy.inf)] if self.rows else []
        if limit_bytes is not None:
            unit = max(float(self.bytes.max()), 1.0)
            constraints.append(LinearConstraint(self.bytes[None] / unit, -numpy.inf, limit_bytes / unit))
        result = milp(
            first / scale + second * tie,
            constraints=constraints,
            integrality=numpy.ones(self.width),
            bounds=Bounds(numpy.zeros(self.width), self.upper),
            options={"mip_rel_gap": GAP, "node_limit": NODE_LIMIT},
        )
        if result.x is None:
            return None
        point = self._point(numpy.round(result.x))
        if limit_bytes is None or point.kept_bytes <= limit_bytes:
            return point
        return self.solve(2 * limit_bytes - point.kept_bytes - 1)  # the solver's tolerance let a few bytes through

    def _point(self, chosen: Any) -> Point:
        """The choice, without what the solver kept for nothing: it stops a little short of the best."""
        keep = {node.name for node in self.nodes if chosen[self.kept(node.name)]}
        state = frozenset(name for name, place in self.state.items() if chosen[place])
        again = self._again(keep, state)
        read = {source for node in self.nodes if node.name in again for source in node.sources}
        keep &= read | {node.name for node in self.nodes if node.needed}
        places = [self.kept(name) for name in keep] + [self.again(name) for name in again]
        places += [self.state[name] for name in state]
        places += [place for name, place in self.masked.items() if name in again and name in state]
        settled = numpy.zeros(self.width)
        settled[places] = 1
        seconds = max(0.0, float(self.seconds @ settled))
        return Point(frozenset(keep), state, frozenset(again), round(float(self.bytes @ settled)), seconds)

    def _again(self, keep: set[str], state: frozenset[str]) -> set[str]:
        """The nodes to run again for what the backward reads and is not kept."""
        wanted = [node.name for node in self.nodes if node.needed and node.name not in keep]
        wanted += [name for name in self.state if name not in state]
        again: set[str] = set()
        while wanted:
            name = wanted.pop()
            if name not in again:
                again.add(name)
                sources = self.nodes[self.place[name]].sources
                wanted += [source for source in sources if source in self.place and source not in keep]
        return again
