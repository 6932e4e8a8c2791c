"""Choose passes and what blocks keep together: the pipeline with the least predicted time whose step fits.

Every pipeline of the passes' offers has a ladder of plans (`rewrite.plan.ladder`). Those are taken in the order of
their time: first as a bound from one solve, then as the rung itself, at last as measured by a run on fakes; the first
that is measured and fits is the answer. What there is to choose from and its order do not depend on the budget, so a
smaller budget is never answered by a plan with a larger peak.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rewrite.contract import Numerics, Pass
from rewrite.errors import BudgetError, InputError
from rewrite.example import Example
from rewrite.memory.timeline import Estimate
from rewrite.plan.apply import apply_points
from rewrite.plan.candidate import Candidate, Mix, mixes
from rewrite.plan.chain import Simulation
from rewrite.plan.ladder import RUNGS, TRUST
from rewrite.plan.model import plan_model, plan_models
from rewrite.plan.offers import applied, installed, offers, pipelines
from rewrite.plan.outline import Outline, outline
from rewrite.plan.search import KeepPlan, Search, search_of
from rewrite.plan.settled import spot_of
from rewrite.plan.shortfall import too_small
from rewrite.plan.stage import staged
from rewrite.plan.trial import try_program
from rewrite.program import Program
from rewrite.report.sizes import parse_bytes
from rewrite.spec import render

FLOORS = 3
"""Pipelines with the lowest simulated peaks that are run to find the lowest peak there is."""

SHARE = 1 / 500
"""Of the untouched step's time: plans that differ by less are equally fast, and that of the fewest passes is taken."""

NEAR = 512
"""Offers of a pass that differ by no more than one part in this many of the untouched peak are taken as equal."""

MIXING = 5
"""Steps of `SHARE` that a mix, which is harder to read, must gain on pipelines whose passes stand everywhere."""

BOUND, RUNG, MEASURED = range(3)
"""How a time is known, from a bound that takes one solve to a plan that was run."""


@dataclass(frozen=True)
class Priced:
    """A peak, and the time of a step that reaches it, of which both are predicted."""

    peak_bytes: int
    time_ratio: float
    """Of the untouched step's time."""
    spec: str
    names: str
    """The passes without the budget, which is the peak: `chunk-loss{chunks=8},checkpoint`."""


@dataclass(frozen=True)
class JointPlan:
    """The passes chosen for a budget, and what a step with them takes."""

    passes: tuple[Pass, ...]
    """The whole pipeline, the pass that takes the budget last."""
    keep: KeepPlan
    """What blocks keep, in the program that the other passes make."""
    before: Estimate
    """Of the program before the choice."""
    time_ratio: float
    """Predicted time of a step, of that before the choice: operators at the device's rates, with what a recompute and
    a chunk add."""

    @property
    def after(self) -> Estimate:
        return self.keep.after

    @property
    def spec(self) -> str:
        """The pipeline as text, which reproduces the plan."""
        return render(self.passes)

    @property
    def priced(self) -> Priced:
        """Its place among the points of a frontier."""
        chosen = self.passes[:-1] if self.keep.kept else self.passes
        return _priced(self.after.peak_bytes, self.time_ratio, chosen, self.passes)


Entry = tuple[int, int, int, int, JointPlan | None]
"""Time in steps of `SHARE`, number of the pipeline, how the time is known, rung, and the plan once it is measured."""


class Joint:
    """All pipelines for one captured call, made as far as budgets ask for them."""

    def __init__(
        self,
        program: Program,
        example: Example,
        *,
        profile: str | None = None,
        allow: Numerics = Numerics.REASSOCIATED,
        given: Sequence[str] = (),
        only: int | None = None,
    ) -> None:
        """`given` names passes that are not to be offered; `only` is the place in a pass's offers to go by, if one."""
        self.program = program
        self.example = example
        self.profile = profile
        self.allow = allow
        self.given = given
        self.only = only
        self.base: Search = search_of(program, example, profile=profile)
        self._candidates: list[Candidate] = []

    @property
    def candidates(self) -> list[Candidate]:
        """The pipelines there are; the first has no pass."""
        if not self._candidates:
            root, rates, known = self.example.root, self.base.rates, self.base.known
            assert root is not None
            offering = [each for each in installed() if each.name not in self.given]
            offered = offers(self.program, offering, self.allow)
            if self.only is None:
                offered = [self._distinct(each) for each in offered]
            else:
                offered = [[each[self.only]] for each in offered]
            made = applied(self.program, pipelines(offered))
            programs = [program for _, program in made]
            models = plan_models(programs, root, self.base.before, self.base.device, rates, known=known)
            whole = [Candidate(passes, program, model) for (passes, program), model in zip(made, models, strict=True)]
            self._candidates = [*whole, *(mixes(whole, self._candidate) if self.only is None else ())]
        return self._candidates

    def _candidate(self, passes: tuple[Pass, ...]) -> Candidate | None:
        """The candidate of a pipeline that is made while searching."""
        assert self.example.root is not None
        key = "candidate", self.profile, render(passes)
        if key not in self.example.found:
            made = None
            for _, program in applied(self.program, [passes]):
                model = plan_model(
                    program, self.example.root, self.base.before, self.base.device, self.base.rates,
                    known=self.base.known,
                )  # fmt: skip
                made = Candidate(passes, program, model)
            self.example.found[key] = made
        found: Candidate | None = self.example.found[key]
        return found

    @property
    def step_seconds(self) -> float:
        """Of the untouched step."""
        return self.candidates[0].step_seconds

    def _distinct(self, offered: Sequence[Pass]) -> list[Pass]:
        """Offers of one pass without those that are much like an earlier one, seen by what pieces take as they are."""
        assert self.example.root is not None
        base, slack = self.base, self.base.before.peak_bytes // NEAR
        made = applied(self.program, [(each,) for each in offered])
        found: list[tuple[Pass, Outline]] = []
        with staged(self.example.root, base.device) as stage:
            for (each,), program in made:
                new = outline(program, stage, base.rates, base.known.kinds)
                if not any(base.known.near(known, new, slack, stage) for _, known in found):
                    found.append((each, new))
        return [each for each, _ in found]

    @property
    def off_bytes(self) -> int:
        """How much higher a run of the untouched program peaks than the simulation says."""
        return self.base.before.peak_bytes - self.candidates[0].ladder.targets()[0]

    @property
    def lowest_bytes(self) -> int:
        """The lowest peak of all pipelines, as the simulation has it."""
        return min(each.lowest_bytes for each in self.candidates) + self.off_bytes

    def plan(self, budget: str | int) -> JointPlan:
        """The plan for a budget in bytes (`8GiB`); raises BudgetError when there is none, InputError for no size."""
        budget_bytes = budget if isinstance(budget, int) else parse_bytes(budget)
        if self.base.before.peak_bytes <= budget_bytes:
            return JointPlan((), self.base.plan(budget_bytes), self.base.before, 1.0)
        queue = self._bounds(budget_bytes)
        while queue:
            _, number, stage, rung, found = heapq.heappop(queue)
            if found is not None:
                return found
            candidate = self.candidates[number]
            if stage == BOUND:
                trust = 0 if isinstance(candidate, Mix) else TRUST
                rung = candidate.ladder.first(budget_bytes, self.off_bytes, start=0, trust=trust)
            elif isinstance(candidate, Mix):
                found = self._mixed(candidate, rung, budget_bytes, budget)
                rung += found is None
            else:
                found = self._planned(candidate, budget_bytes, budget)
                rung = rung if found else RUNGS + 1
            if found is not None:
                heapq.heappush(queue, (self._shares(number, found.time_ratio), number, MEASURED, rung, found))
            elif rung <= RUNGS:
                seconds = candidate.step_seconds + candidate.ladder.simulated(rung).seconds
                heapq.heappush(queue, (self._shares(number, seconds / self.step_seconds), number, RUNG, rung, None))
        return self._lowest(budget, budget_bytes)

    def _shares(self, number: int, time_ratio: float) -> int:
        """What pipelines are ordered by."""
        return round(time_ratio / SHARE) + (MIXING if isinstance(self.candidates[number], Mix) else 0)

    def _bounds(self, budget_bytes: int) -> list[Entry]:
        """For each pipeline that may fit, the least time that it can take."""
        room = int(budget_bytes * (1 + TRUST)) - self.off_bytes
        found: list[Entry] = []
        for number, candidate in enumerate(self.candidates):
            best = candidate.chain.best(room)
            if best is not None:
                ratio = (candidate.step_seconds + best.seconds) / self.step_seconds
                found.append((self._shares(number, ratio), number, BOUND, 0, None))
        heapq.heapify(found)
        return found

    def _planned(self, candidate: Candidate, budget_bytes: int, budget: str | int) -> JointPlan | None:
        """The plan of one pipeline, measured; None when none of its plans fits."""
        try:
            keep = self._search(candidate).plan(budget_bytes)
        except BudgetError:
            return None
        return self._joint(candidate.passes, keep, candidate.step_seconds, budget)

    def _mixed(self, mix: Mix, rung: int, budget_bytes: int, budget: str | int) -> JointPlan | None:
        """The plan of one rung of a mix, which is the same for every budget; None when it does not fit this one."""
        candidate = mix.realized(mix.ladder.simulated(rung))
        own_bytes = mix.ladder.targets()[rung] + self.off_bytes
        found = None if candidate is None else self._planned(candidate, own_bytes, own_bytes)
        if candidate is None or found is None or found.after.peak_bytes > budget_bytes:
            return None
        as_asked = self._planned(candidate, budget_bytes, budget)
        return as_asked if as_asked is not None and as_asked.keep.rung == found.keep.rung else found

    def _search(self, candidate: Candidate) -> Search:
        return search_of(candidate.program, self.example, profile=self.profile)

    def _lowest(self, budget: str | int, budget_bytes: int) -> JointPlan:
        """A plan of the pipelines that reach lowest, for a budget near the lowest peak there is; raises BudgetError."""
        order = sorted(range(len(self.candidates)), key=lambda number: (self.candidates[number].lowest_bytes, number))
        lowest: list[Candidate] = []
        for candidate in (self.candidates[number] for number in order[:FLOORS]):
            found = candidate.realized(candidate.ladder.simulated(RUNGS)) if isinstance(candidate, Mix) else candidate
            if found is None:
                continue
            plan = self._planned(found, budget_bytes, budget)
            if plan is not None:
                return plan
            lowest.append(found)
        least = min(lowest, key=lambda each: self._search(each).lowest_tried.peak_bytes)
        by = f"{render(least.passes)} with recompute".removeprefix(" with ")
        raise too_small(budget_bytes, self._search(least).lowest_tried, by, self._ways())

    def _ways(self) -> list[str]:
        """What else there is to do about a budget that is too small."""
        reduced = any(each.numerics is Numerics.REDUCED for each in installed())
        return ["reduced numerics (allow)"] if reduced and self.allow is not Numerics.REDUCED else []

    def _joint(self, passes: tuple[Pass, ...], keep: KeepPlan, step_seconds: float, budget: str | int) -> JointPlan:
        if keep.kept:
            passes = (*passes, _budgeted(budget, self.profile))
        return JointPlan(passes, keep, self.base.before, (step_seconds + keep.seconds) / self.step_seconds)

    def frontier(self, points: int = 10) -> tuple[Priced, ...]:
        """The untouched step, then the least predicted time at peaks from that of the fastest plan to the lowest."""
        highest, lowest = self.base.before.peak_bytes, self.lowest_bytes
        bounds = dict.fromkeys(range(len(self.candidates)), 0)
        budgeted = _budgeted(highest, self.profile)
        found, target = [_priced(highest, 1.0, (), ())], highest
        for left in range(points - 1, 0, -1):
            fastest = self._priced(target, bounds, budgeted)
            if fastest is None:
                break
            found.append(fastest)
            rest = fastest.peak_bytes - lowest
            if rest <= 0:
                break
            target = fastest.peak_bytes - math.ceil(rest / max(left - 1, 1))
        return tuple({each.peak_bytes: each for each in reversed(found)}.values())[::-1]

    def floor(self) -> Estimate:
        """A step of the lowest peak, as the simulation has it, run on fakes."""
        lowest = min(self.candidates, key=lambda each: each.lowest_bytes)
        simulated = lowest.ladder.simulated(RUNGS)
        candidate = (lowest.realized(simulated) if isinstance(lowest, Mix) else None) or lowest
        choice = candidate.ladder.simulated(RUNGS).choice
        spots = [spot_of(piece) for piece in candidate.model.pieces]
        program, _ = apply_points(candidate.program.copy(), spots, candidate.model.points(choice))
        return try_program(program, self.example)

    def _priced(self, target: int, bounds: dict[int, int], budgeted: Pass) -> Priced | None:
        """The least predicted time at this peak, and its plan as `budgeted` would be told of it; None for no plan."""
        least = self._least(target, bounds)
        if least is None:
            return None
        number, best = least
        candidate = self.candidates[number]
        passes = chosen = candidate.passes_of(best.choice)
        if candidate.recomputes(best.choice):
            told = budgeted.within(target, self.profile)
            passes = chosen if told is None else (*chosen, told)
        ratio = (candidate.step_seconds + best.seconds) / self.step_seconds
        return _priced(best.peak_bytes + self.off_bytes, ratio, chosen, passes)

    def _least(self, target: int, bounds: dict[int, int]) -> tuple[int, Simulation] | None:
        """The pipeline of the least time at this peak, by number, and what its pieces keep.

        `bounds` are the times found at higher peaks: a pipeline takes no less at this one, so that one whose bound is
        above the answer needs no solve (lazy evaluation, Minoux 1978). They are raised; what does not fit is left out.
        """
        queue: list[tuple[int, int, Simulation | None]] = [(shares, number, None) for number, shares in bounds.items()]
        heapq.heapify(queue)
        while queue:
            _, number, found = heapq.heappop(queue)
            if found is not None:
                return number, found
            candidate = self.candidates[number]
            best = candidate.chain.best(target - self.off_bytes)
            if best is None:
                del bounds[number]
                continue
            ratio = (candidate.step_seconds + best.seconds) / self.step_seconds
            bounds[number] = self._shares(number, ratio)
            heapq.heappush(queue, (bounds[number], number, best))
        return None


def _priced(peak_bytes: int, time_ratio: float, chosen: Sequence[Pass], passes: Sequence[Pass]) -> Priced:
    """A point; `passes` are the chosen ones and the one that takes the budget, which is named without it."""
    names = [*map(str, chosen), *(each.name for each in passes[len(chosen) :])]
    return Priced(peak_bytes, time_ratio, render(passes), ",".join(names))


def _budgeted(budget: str | int, profile: str | None) -> Pass:
    """The installed pass that keeps to a budget, told this one; raises InputError where there is none."""
    for each in installed():
        told = each.within(budget, profile)
        if told is not None:
            return told
    raise InputError("budget", "no installed pass takes a byte budget", "install one, such as checkpoint")
