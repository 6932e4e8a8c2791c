"""Which pass made, erased or tagged which node."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from rewrite.contract import Pass, PassResult
from rewrite.program import Program, Region
from rewrite.tags import ORIGIN, TAGS
from rewrite.text import argument_text, target_text


class Event(enum.Enum):
    """What happened to a node."""

    CREATED = "created"
    ERASED = "erased"
    RETAGGED = "retagged"
    """Its tags changed."""
    REWIRED = "rewired"
    """It calls something else, or takes other arguments."""


@dataclass(frozen=True)
class Record:
    """One event in the life of one node."""

    step: int
    """Position in the pipeline of the pass that did it."""
    pass_name: str
    region: str
    """Path of the region the node is in after the step."""
    node: str
    event: Event
    origin: tuple[str, ...] = ()
    """Of a created node: the names of the nodes it stands for, where the pass recorded them."""


@dataclass
class Provenance:
    """A pipeline observer that records what each pass did to each node, by the nodes' names."""

    records: list[Record] = field(default_factory=list)
    _steps: int = 0

    def before(self, pass_: Pass, program: Program) -> None:
        """Part of the observer protocol; there is nothing to note before a pass."""

    def after(self, pass_: Pass, program: Program, result: PassResult, seconds: float) -> None:
        """Compare the program before and after one pass."""
        for region in result.program.regions:
            for node, event, origin in _events(program.region(region.path), region):
                self.records.append(Record(self._steps, pass_.name, region.path, node, event, origin))
        self._steps += 1

    def by_step(self, step: int) -> tuple[Record, ...]:
        """What the pass at position `step` did, in graph order."""
        return tuple(record for record in self.records if record.step == step)

    def of_node(self, region: str, node: str) -> tuple[Record, ...]:
        """The life of one node, oldest event first."""
        return tuple(record for record in self.records if (record.region, record.node) == (region, node))


def _events(before: Region, after: Region) -> Iterator[tuple[str, Event, tuple[str, ...]]]:
    if before.graph is after.graph:
        return
    old = {node.name: node for node in before.graph.nodes}
    new = {node.name: node for node in after.graph.nodes}
    for name in old:
        if name not in new:
            yield name, Event.ERASED, ()
    for name, node in new.items():
        if name not in old:
            yield name, Event.CREATED, tuple(node.meta.get(ORIGIN, ()))
            continue
        if _call(node) != _call(old[name]):
            yield name, Event.REWIRED, ()
        if _tags(node) != _tags(old[name]):
            yield name, Event.RETAGGED, ()


def _call(node: fx.Node) -> tuple[str, ...]:
    return node.op, target_text(node.target), argument_text(node.args), argument_text(dict(node.kwargs))


def _tags(node: fx.Node) -> dict[str, object]:
    return {key: node.meta[key] for key in TAGS if key in node.meta}
