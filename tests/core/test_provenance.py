from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rewrite.contract import Numerics, Pass, PassResult
from rewrite.pipeline import run
from rewrite.program import Program
from rewrite.provenance import Event, Provenance, Record
from rewrite.tags import ORIGIN, RECOMPUTE
from tests.core.programs import two_blocks


@dataclass(frozen=True)
class TagGelu(Pass):
    name: ClassVar[str] = "tag-gelu"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def apply(self, program: Program) -> PassResult:
        for node in program.region("blocks.0").nodes():
            if node.name.startswith("gelu"):
                node.meta[RECOMPUTE] = 0
        return PassResult(program, modified=True)


@dataclass(frozen=True)
class SwapGelu(Pass):
    """Puts a relu where the gelu was."""

    name: ClassVar[str] = "swap-gelu"
    numerics: ClassVar[Numerics] = Numerics.REDUCED

    def apply(self, program: Program) -> PassResult:
        graph = program.region("blocks.0").graph
        gelu = next(node for node in graph.nodes if node.name == "gelu")
        with graph.inserting_before(gelu):
            relu = graph.call_function(torch.relu, gelu.args)
        relu.meta.update(val=gelu.meta["val"], **{ORIGIN: ("gelu",)})
        gelu.replace_all_uses_with(relu)
        graph.erase_node(gelu)
        return PassResult(program, modified=True)


def test_each_event_is_told_with_the_pass_that_did_it() -> None:
    provenance = Provenance()

    run(two_blocks(), [TagGelu(), SwapGelu()], [provenance])

    assert provenance.by_step(0) == (Record(0, "tag-gelu", "blocks.0", "gelu", Event.RETAGGED),)
    assert provenance.by_step(1) == (
        Record(1, "swap-gelu", "blocks.0", "gelu", Event.ERASED),
        Record(1, "swap-gelu", "blocks.0", "relu", Event.CREATED, ("gelu",)),
        Record(1, "swap-gelu", "blocks.0", "dropout", Event.REWIRED),
    )
    assert [record.event for record in provenance.of_node("blocks.0", "gelu")] == [Event.RETAGGED, Event.ERASED]


def test_a_pass_that_does_nothing_leaves_no_record() -> None:
    @dataclass(frozen=True)
    class Idle(Pass):
        name: ClassVar[str] = "idle"
        numerics: ClassVar[Numerics] = Numerics.EXACT

        def apply(self, program: Program) -> PassResult:
            return PassResult(program, modified=False)

    provenance = Provenance()

    run(two_blocks(), [Idle()], [provenance])

    assert provenance.records == []
