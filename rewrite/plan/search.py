"""Plan to a byte budget: choose what every block keeps so that the step fits, run the result on fakes, and correct.

Plans come from a ladder: targets for the simulated peak, evenly spaced from that of the untouched program to the lowest
there is, each with its best plan. The ladder does not depend on the budget. For a budget the first rung is taken, from
the top, whose plan fits when it is run; rungs that the simulation puts far above the budget are passed over. So a
smaller budget is never answered by a plan with a larger peak.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rewrite.errors import InputError
from rewrite.example import Example
from rewrite.memory.rates import PEAK_RATES, Rates
from rewrite.memory.timeline import Estimate
from rewrite.plan.apply import Kept, apply_points, groups_of
from rewrite.plan.chain import Simulation
from rewrite.plan.curve import Point
from rewrite.plan.ladder import RUNGS, Ladder
from rewrite.plan.model import Known, PlanModel, plan_model
from rewrite.plan.settled import Settled, Spot, call_key, spot_of
from rewrite.plan.shortfall import too_small
from rewrite.plan.trial import try_program
from rewrite.program import Program
from rewrite.report.sizes import size_text
from rewrite.text import program_text

log = logging.getLogger("rewrite")


@dataclass(frozen=True)
class KeepPlan:
    """A program tagged so that a step fits, and what that takes."""

    program: Program
    kept: tuple[Kept, ...]
    """What each group of blocks keeps; nothing where a block is left as it is."""
    budget_bytes: int
    before: Estimate
    """Of the program as it was given."""
    after: Estimate
    """Of the tagged program: its peak is at most the budget."""
    seconds: float
    """Of what the backward computes again, on the device the plan was made for."""
    rung: int
    """Place in the ladder; 0 is the program as it was given."""


def plan_keep(program: Program, budget_bytes: int, *, profile: str | None = None, calibrate: bool = False) -> KeepPlan:
    """The plan with the least recompute whose step peaks at no more than `budget_bytes`, as `estimate` counts them.

    `program` is what a pass is given while a model is rewritten. `profile` names the rates that price a recompute
    (`rewrite.memory.rates.PEAK_RATES`; by default those of the device that bytes are counted for). With `calibrate` the
    nodes are timed on the device where the model is instead.

    Raises BudgetError when no plan fits, naming the lowest peak there is and what holds it there; InputError for an
    unknown profile.
    """
    example = program.metadata.get("example")
    if not isinstance(example, Example) or example.root is None:
        raise InputError(
            "plan_keep", "the program is not a whole model that is being rewritten", "call it from a pass's apply()"
        )
    key = call_key(program, example.args, example.kwargs), budget_bytes, profile, calibrate
    if key in example.settled:
        return _again(program, budget_bytes, example.settled[key])
    search = search_of(program, example, profile=profile, calibrate=calibrate)
    plan = search.plan(budget_bytes)
    spots, points = search.places(plan.rung)
    example.settled[key] = Settled(spots, points, plan.before, plan.after, plan.seconds, plan.rung)
    return plan


def _again(program: Program, budget_bytes: int, settled: Settled) -> KeepPlan:
    """The plan that was made for an equal program."""
    tagged, kept = apply_points(program.copy(), settled.spots, settled.points)
    if len(groups_of(settled.spots, settled.points)) > sum(each.passing for each in kept):
        log.warning(
            "The plan for %s holds nothing of what passes between some blocks, and these have got hooks since: they "
            "hold it now, and a step takes more.\nAdd hooks before the first step to have a plan that knows of them.",
            size_text(budget_bytes),
        )
    return KeepPlan(tagged, kept, budget_bytes, settled.before, settled.after, settled.seconds, settled.rung)


def search_of(program: Program, example: Example, *, profile: str | None = None, calibrate: bool = False) -> Search:
    """The search of a program; while its model is being rewritten, the same one for an equal program."""
    key = program_text(program), profile, calibrate
    if key not in example.found:
        known = example.found.setdefault(("known", profile, calibrate), Known())
        example.found[key] = Search(program, example, profile=profile, calibrate=calibrate, known=known)
    found: Search = example.found[key]
    return found


class Search:
    """The ladder of one program, made as far as budgets ask for it."""

    def __init__(
        self,
        program: Program,
        example: Example,
        *,
        profile: str | None = None,
        calibrate: bool = False,
        known: Known | None = None,
    ) -> None:
        self.program = program
        self.example = example
        self.device = example.device or "cpu"
        self.rates = rates_of(profile, self.device)
        self.calibrate = calibrate
        self.known = known or Known()
        self.before = try_program(program, example)
        self._model: PlanModel | None = None
        self._ladder: Ladder | None = None
        self._tried: dict[tuple[int, ...], tuple[Program, tuple[Kept, ...], Estimate]] = {}

    def plan(self, budget_bytes: int) -> KeepPlan:
        """The plan for a budget; raises BudgetError."""
        if self.before.peak_bytes <= budget_bytes:
            return KeepPlan(self.program, (), budget_bytes, self.before, self.before, 0.0, 0)
        for rung in range(self._first(budget_bytes), RUNGS + 1):
            simulated = self.simulated(rung)
            program, kept, after = self._try(simulated.choice)
            if after.peak_bytes <= budget_bytes:
                return KeepPlan(program, kept, budget_bytes, self.before, after, simulated.seconds, rung)
        raise too_small(budget_bytes, self.lowest_tried)

    @property
    def lowest_tried(self) -> Estimate:
        """The step with the lowest peak of those that were run."""
        return min([self.before, *(after for _, _, after in self._tried.values())], key=lambda each: each.peak_bytes)

    @property
    def model(self) -> PlanModel:
        """The chain of pieces, made when a budget first asks for it."""
        if self._model is None:
            assert self.example.root is not None
            self._model = plan_model(
                self.program, self.example.root, self.before, self.device, self.rates,
                calibrate=self.calibrate, known=self.known,
            )  # fmt: skip
        return self._model

    @property
    def ladder(self) -> Ladder:
        """The plans that answers are taken from."""
        if self._ladder is None:
            self._ladder = Ladder(self.model.chain)
        return self._ladder

    def _first(self, budget_bytes: int) -> int:
        """The first rung worth running, if the simulation is as far off as it is for the untouched program."""
        return self.ladder.first(budget_bytes, self.before.peak_bytes - self.ladder.targets()[0])

    def simulated(self, rung: int) -> Simulation:
        """The plan of a rung, with its simulated peak."""
        return self.ladder.simulated(rung)

    def places(self, rung: int) -> tuple[tuple[Spot, ...], tuple[Point | None, ...]]:
        """Where the plan of a rung keeps what."""
        if rung == 0:
            return (), ()
        points = self.model.points(self.simulated(rung).choice)
        return tuple(spot_of(piece) for piece in self.model.pieces), points

    def measured(self, choice: tuple[int, ...]) -> Estimate:
        """The memory of a step with this choice, run on fakes."""
        return self._try(choice)[2]

    def _try(self, choice: tuple[int, ...]) -> tuple[Program, tuple[Kept, ...], Estimate]:
        if choice not in self._tried:
            spots = [spot_of(piece) for piece in self.model.pieces]
            program, kept = apply_points(self.program.copy(), spots, self.model.points(choice))
            self._tried[choice] = program, kept, try_program(program, self.example)
        return self._tried[choice]


def profile_for(device: str) -> str:
    """The profile that prices a plan for a device unless another is named."""
    return "cpu" if device == "cpu" else "h100"


def rates_of(profile: str | None, device: str) -> Rates:
    """The rates that price a plan for a device: those of the named profile. Raises InputError for an unknown one."""
    name = profile or profile_for(device)
    if name not in PEAK_RATES:
        raise InputError(f"device profile {name!r}", "it is not known", f"choose one of {', '.join(PEAK_RATES)}")
    return PEAK_RATES[name]
