"""Checkpoint to a byte budget: the planner chooses what every block keeps, so that a step fits."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import rewrite
from rewrite import BudgetError, Change, PassResult, Refusal, parse_bytes, size_text

if TYPE_CHECKING:
    from rewrite import KeepPlan, Kept, Program

log = logging.getLogger("rewrite")


def within_budget(program: Program, budget: str | int, profile: str | None = None) -> PassResult:
    """Tag `program` with the least recompute, by a profile's rates, whose step peaks at no more than `budget`.

    Raises BudgetError when there is none, InputError for a text that is no number of bytes. A call that comes later, as
    of a larger batch than the planned one, gets the plan whose peak is lowest, and a warning.
    """
    bytes_given = budget if isinstance(budget, int) else parse_bytes(budget)
    try:
        plan = rewrite.plan_keep(program, bytes_given, profile=profile)
    except BudgetError as error:
        if program.metadata.get("first", True):
            raise
        log.warning("%s\nThis call, of another kind than the planned one, runs all the same, with that peak.", error)
        plan = rewrite.plan_keep(program, error.lowest_bytes, profile=profile)
    if not plan.kept:
        reason = f"a step takes {size_text(plan.before.peak_bytes)} as it is, within the budget: nothing is recomputed"
        return PassResult(program, False, refusals=(Refusal("", reason),))
    return PassResult(plan.program, True, _changes(plan))


def plans(program: Program) -> bool:
    """Whether `program` is a training step of the whole model, which can be planned; other calls cannot."""
    example = program.metadata.get("example")
    return example is not None and example.root is not None


def _changes(plan: KeepPlan) -> tuple[Change, ...]:
    return tuple(
        Change(each.path, _passing(each) if each.passing else _within(each), each.instances, each.tagged)
        for each in plan.kept
    )


def _within(kept: Kept) -> str:
    return (
        f"keep {len(kept.keep)} values and the state of {len(kept.keep_state)} operators, run {len(kept.again)} "
        f"operations again in the backward{f', {len(kept.release)} of them twice' if kept.release else ''}"
    )


def _passing(kept: Kept) -> str:
    """Of blocks in a row."""
    often = ", each time it is needed" if kept.release else ""
    return f"hold nothing of what {', '.join(kept.again)} give to the block after, and make it again{often}"
