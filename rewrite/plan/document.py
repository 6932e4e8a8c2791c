"""A plan as a record that is printed, saved and loaded, and the passes of one that was saved."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewrite import registry
from rewrite.contract import Numerics, Pass
from rewrite.errors import PlanError
from rewrite.example import Example
from rewrite.memory.timeline import Estimate
from rewrite.plan.apply import Kept
from rewrite.plan.fingerprint import Fingerprint, fingerprint
from rewrite.plan.joint import Priced
from rewrite.program import Program
from rewrite.report.columns import PRINTED_WIDTH, plain
from rewrite.report.documents import PLAN_SCHEMA
from rewrite.report.plan import plan_lines
from rewrite.spec import parse

AGAIN = "give a file that `rewrite plan MODEL --budget SIZE -o FILE` wrote"


@dataclass(frozen=True)
class Plan:
    """The passes chosen for a budget, with what they take and what else could have been had."""

    model: str
    passes: tuple[Pass, ...]
    """The whole pipeline, given passes first."""
    spec: str
    """The pipeline as text, ready to paste."""
    numerics: Numerics
    """The loosest of the passes."""
    budget_bytes: int
    profile: str
    """Whose peak rates price the time."""
    fingerprint: Fingerprint
    before: Estimate
    after: Estimate
    chosen: Priced
    """The plan's peak, its predicted time, and its passes."""
    kept: tuple[Kept, ...]
    """What each group of blocks keeps; nothing without recompute."""
    frontier: tuple[Priced, ...]
    """Predicted peaks and times from the untouched step to the lowest peak, with no step run."""
    floor: Estimate
    """The step with the lowest peak there is."""

    def __str__(self) -> str:
        """The plan as `rewrite plan` prints it."""
        return plain(plan_lines(self, PRINTED_WIDTH))

    @property
    def time_ratio(self) -> float:
        """Predicted time of a step, of that of the untouched one."""
        return self.chosen.time_ratio


def is_plan_file(passes: str | Sequence[Pass]) -> bool:
    """Whether passes are given as the name of a file with a plan."""
    return isinstance(passes, str) and passes.strip().endswith(".json")


@dataclass(frozen=True)
class Saved:
    """The passes of a plan file, handed out for the step they were made for alone."""

    path: str
    spec: str
    fingerprint: Fingerprint
    optimizer: str | None
    device: str

    def __call__(self, program: Program) -> tuple[Pass, ...]:
        """The passes; raises PlanError when `program` is another one than was planned."""
        example: Example = program.metadata["example"]
        difference = self.fingerprint.difference(fingerprint(program, example))
        if difference:
            raise PlanError(
                f"plan {self.path}",
                f"it was made for another training step: {difference}",
                "make it again with `rewrite plan`, give the example inputs it was made with, or its passes as a spec",
            )
        return self.passes()

    def passes(self) -> tuple[Pass, ...]:
        """What the plan consists of."""
        return parse(self.spec, registry.load)


def load_plan(path: str) -> Saved:
    """The plan in a file that `rewrite plan -o` wrote; raises PlanError for any other."""
    document = _read(path.strip())
    try:
        told = document["fingerprint"]
        found = Saved(
            path.strip(),
            _text(document["spec"]),
            Fingerprint(_text(told["graph"]), _text(told["parameters"]), tuple(map(_text, told["inputs"]))),
            document["optimizer"],
            _text(document["device"]),
        )
    except (KeyError, TypeError) as fault:
        raise PlanError(
            f"plan {path}", f"it lacks, or has wrong, {fault}", "make it again with `rewrite plan`"
        ) from None
    found.passes()
    return found


def _read(path: str) -> Mapping[str, Any]:
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as fault:
        raise PlanError(f"plan {path}", f"it cannot be read: {fault.strerror}", AGAIN) from None
    except ValueError as fault:
        raise PlanError(f"plan {path}", f"it is not JSON: {fault}", AGAIN) from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != PLAN_SCHEMA:
        raise PlanError(f"plan {path}", f"its schema is {schema!r}, not {PLAN_SCHEMA!r}", AGAIN)
    found: Mapping[str, Any] = document
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} in place of a text")
    return value
