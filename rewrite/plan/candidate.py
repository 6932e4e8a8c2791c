"""Pipelines to choose from, each with its ladder of plans: with passes everywhere, or only where they pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from rewrite.contract import Pass
from rewrite.plan.chain import Chain, Link, Simulation
from rewrite.plan.globs import globs
from rewrite.plan.ladder import Ladder
from rewrite.plan.model import PlanModel
from rewrite.plan.offers import in_order
from rewrite.program import Program

Make = Callable[[tuple[Pass, ...]], "Candidate | None"]
"""The candidate of a pipeline; None when it cannot run."""


class Candidate:
    """One pipeline, with the chain of the program it makes."""

    def __init__(self, passes: tuple[Pass, ...], program: Program, model: PlanModel) -> None:
        self.passes = passes
        self.program = program
        self.model = model
        self.chain: Chain = model.chain
        self.ladder = Ladder(self.chain)

    @property
    def step_seconds(self) -> float:
        """Of a step without recompute."""
        return self.model.step_seconds

    @property
    def lowest_bytes(self) -> int:
        """The lowest simulated peak."""
        return self.ladder.targets()[-1]

    def passes_of(self, choice: Sequence[int]) -> tuple[Pass, ...]:
        """The passes for a choice of what pieces do."""
        return self.passes

    def recomputes(self, choice: Sequence[int]) -> bool:
        """Whether anything is computed again under a choice, beside what passes do by themselves."""
        return any(choice)


class Mix(Candidate):
    """A pipeline and the offers of one more pass, each block with or without it.

    A piece's options are those it has without the pass, and then those with each offer; their time is told beside that
    of a step without.
    """

    def __init__(self, plain: Candidate, offers: Sequence[tuple[Pass, Candidate]], make: Make) -> None:
        super().__init__(plain.passes, plain.program, plain.model)
        self.offers = [each for each, _ in offers]
        self.make = make
        links, self.taken = [], []
        for number, link in enumerate(plain.chain.links):
            options, taken = list(link.options), [-1] * len(link.options)
            before = plain.model.options[number].step_seconds
            for place, (_, other) in enumerate(offers):
                if plain.model.pieces[number].kind.key == other.model.pieces[number].kind.key:
                    continue
                more = other.model.options[number].step_seconds - before
                options += [replace(each, seconds=each.seconds + more) for each in other.chain.links[number].options]
                taken += [place] * len(other.chain.links[number].options)
            links.append(replace(link, options=tuple(options)))
            self.taken.append(taken)
        self.firsts = [[place for place, each in enumerate(taken) if each not in taken[:place]] for taken in self.taken]
        self.chain = replace(plain.chain, links=tuple(links), _bases=[])
        self.ladder = Ladder(self.chain)

    def passes_of(self, choice: Sequence[int]) -> tuple[Pass, ...]:
        """The pipeline, with each offer on the blocks that take it."""
        blocks: dict[int, list[str]] = {}
        for piece, taken, option in zip(self.model.pieces, self.taken, choice, strict=True):
            if taken[option] >= 0 and piece.instance not in blocks.setdefault(taken[option], []):
                blocks[taken[option]].append(piece.instance)
        chosen = [replace(self.offers[place], **{SELECT: globs(paths)}) for place, paths in sorted(blocks.items())]
        return in_order((*self.passes, *chosen))

    def recomputes(self, choice: Sequence[int]) -> bool:
        return any(option not in firsts for option, firsts in zip(choice, self.firsts, strict=True))

    def realized(self, simulated: Simulation) -> Candidate | None:
        """The candidate whose passes stand where a plan has them."""
        return self.make(self.passes_of(simulated.choice))


SELECT = "select"
"""The option by which a pass is kept to modules: globs of their paths."""


def mixes(candidates: Sequence[Candidate], make: Make) -> list[Mix]:
    """For each pipeline without a pass that can be kept to blocks, the mix with that pass's offers."""
    found: list[Mix] = []
    for plain in candidates:
        offers: dict[str, list[tuple[Pass, Candidate]]] = {}
        for other in candidates:
            more = [each for each in other.passes if each not in plain.passes]
            if len(other.passes) == len(plain.passes) + 1 and len(more) == 1 and _mixable(more[0], plain, other):
                offers.setdefault(more[0].name, []).append((more[0], other))
        found += [Mix(plain, each, make) for each in offers.values()]
    return found


def _mixable(pass_: Pass, plain: Candidate, other: Candidate) -> bool:
    """Whether what a pass changes is blocks that several stand beside, and nothing between them."""
    if not any(field.name == SELECT for field in fields(pass_)) or getattr(pass_, SELECT) is not None:
        return False
    if len(plain.model.pieces) != len(other.model.pieces) or plain.chain.values != other.chain.values:
        return False
    changed = []
    for one, two, before, after in zip(
        plain.model.pieces, other.model.pieces, plain.chain.links, other.chain.links, strict=True
    ):
        if one.instance != two.instance or not _same_ends(before, after):
            return False
        if one.kind.key != two.kind.key:
            changed.append(one.instance)
    runs = [piece.instance for piece in plain.model.pieces]
    return "" not in changed and len(set(changed)) > 1 and all(runs.count(each) == 1 for each in changed)


def _same_ends(one: Link, two: Link) -> bool:
    return one.inputs == two.inputs and one.outputs == two.outputs and one.tied == two.tied
