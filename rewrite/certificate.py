"""The certificate of a verification: what was compared, and how close it was. Plain records, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA = "rewrite/certificate/1"

Kind = Literal["structure", "identity", "loss", "output", "gradient", "buffer", "rng", "hook", "error"]


@dataclass(frozen=True)
class Row:
    """One value compared in one case."""

    name: str
    kind: Kind
    equal: bool
    """Bit-equal; NaN equals NaN."""
    max_abs: float = 0.0
    """Largest difference of two elements; infinite where the two cannot be subtracted."""
    max_rel: float = 0.0
    """`max_abs` over the largest magnitude of the original's value."""
    tolerance: float = 0.0
    """Largest `max_abs` that passes; 0 asks for equal bits."""
    case: str = ""
    """Mode, batch size and seed of the step; "" for what does not depend on a step."""
    note: str = ""
    """What differs, in words, when numbers do not say it."""

    @property
    def passed(self) -> bool:
        return self.equal or (self.tolerance > 0 and self.max_abs <= self.tolerance)


@dataclass(frozen=True)
class Certificate:
    """Whether a rewritten module computes what the original does, with every comparison that was made."""

    passed: bool
    numerics: str
    """What the rewrite promised: "exact", "reassociated" or "reduced"."""
    rows: tuple[Row, ...]
    cases: tuple[str, ...]
    """The steps that were run."""
    skipped: tuple[str, ...] = ()
    """Cases that the original itself could not run, and kinds of values that say little in theirs, with the reason."""

    @property
    def failures(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.passed)

    @property
    def summary(self) -> str:
        """The verdict in one sentence, and the first difference when there is one."""
        counts = f"{len(self.rows)} values in {len(self.cases)} steps"
        if self.passed:
            equal = all(row.equal for row in self.rows)
            return f"verified: {counts} {'bit-equal' if equal else f'within the tolerance of {self.numerics}'}"
        first = self.failures[0]
        where = f" ({first.case})" if first.case else ""
        detail = first.note or f"off by {first.max_abs:.3g}, allowed {first.tolerance:.3g}"
        named = f"{first.kind} {first.name}".strip()
        return f"differs: {len(self.failures)} of {counts}, first {named}{where}: {detail}"

    def __str__(self) -> str:
        return self.summary

    def to_json(self) -> dict[str, Any]:
        """Plain values only; an infinite or undefined difference becomes null."""
        return {
            "schema": SCHEMA,
            "passed": self.passed,
            "numerics": self.numerics,
            "summary": self.summary,
            "cases": list(self.cases),
            "skipped": list(self.skipped),
            "rows": [_row_json(row) for row in self.rows],
        }


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "case": row.case,
        "kind": row.kind,
        "name": row.name,
        "passed": row.passed,
        "equal": row.equal,
        "max_abs": _finite(row.max_abs),
        "max_rel": _finite(row.max_rel),
        "tolerance": row.tolerance,
        "note": row.note,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def farthest(rows: Sequence[Row]) -> str:
    """The output that is farthest off, in words."""
    if not rows:
        return "there are no outputs"
    row = max(rows, key=lambda each: (not each.passed, each.max_abs / each.tolerance if each.tolerance else 0.0))
    if row.equal:
        return "every output is bit-equal"
    name = row.name or "the output"
    if not math.isfinite(row.max_abs):
        return f"{name} {row.note or 'is not finite where it was'}"
    return f"{name} is off by {row.max_abs:.3g} ({row.max_rel:.3g} of the largest), allowed {row.tolerance:.3g}"
