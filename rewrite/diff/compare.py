"""Two programs and their estimates as one diff."""

from __future__ import annotations

from collections.abc import Sequence

from rewrite.diff.hunks import hunks_between, hunks_of
from rewrite.diff.model import GraphDiff, PassRecord, View
from rewrite.memory.timeline import Estimate
from rewrite.pipeline import Step
from rewrite.program import Program
from rewrite.spec import render_pass


def compare(
    model: str,
    before: Program,
    after: Program,
    before_estimate: Estimate,
    after_estimate: Estimate,
    steps: Sequence[Step],
    *,
    profile: str = "",
) -> GraphDiff:
    """What `steps` made of `before`, with the bytes of both sides.

    `before_estimate` is of the captured module without passes, `after_estimate` of the rewritten one, both for one
    device and optimizer. `profile` names the peak rates that price the time (`rewrite.memory.rates.PEAK_RATES`).
    """
    hunks = hunks_between(before, after, before_estimate, after_estimate)
    changed = tuple(hunk for hunk in hunks if hunk.changed)
    return GraphDiff(
        model=model,
        passes=tuple(pass_record(step) for step in steps),
        before=before_estimate,
        after=after_estimate,
        hunks=changed,
        opaque=tuple(after.opaque),
        unchanged=sum(len(hunk.instances) for hunk in hunks if not hunk.changed),
        profile=profile,
    )


def view(model: str, program: Program, estimate: Estimate) -> View:
    """One program with what its nodes keep."""
    return View(model, estimate, hunks_of(program, estimate), tuple(program.opaque))


def pass_record(step: Step) -> PassRecord:
    """A step of the pipeline as a plain record."""
    return PassRecord(
        name=step.applied.name,
        spec=render_pass(step.applied),
        numerics=step.applied.numerics.value,
        modified=step.result.modified,
        changes=tuple(step.result.changes),
        refusals=tuple(step.result.refusals),
        seconds=step.seconds,
    )
