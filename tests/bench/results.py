"""What a run found, row by row, and as a JSON document."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from tests.bench.step import Measured
from tests.bench.timing import Time

SCHEMA = "rewrite/bench/1"
"""A change that breaks readers gives it a new number."""


@dataclass(frozen=True)
class Row:
    """One method on one model: what was measured, or why it was not."""

    model: str
    method: str
    measured: Measured | None = None
    time: Time | None = None
    reason: str = ""
    """Why something is missing; empty otherwise."""
    eager_peak_bytes: int = 0

    @property
    def peak_ratio(self) -> float | None:
        """Of eager's peak, both above parameters, gradients included."""
        if self.measured is None or not self.eager_peak_bytes:
            return None
        return self.measured.memory.peak_bytes / self.eager_peak_bytes


def document(rows: Sequence[Row], repetitions: int) -> dict[str, Any]:
    """Everything, for a program to read. Bytes and operations are integers, times are CPU seconds of one thread."""
    return {
        "schema": SCHEMA,
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "rewrite-torch")},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": 1,
        "repetitions": repetitions,
        "rows": [_row_document(row) for row in rows],
    }


def _row_document(row: Row) -> dict[str, Any]:
    time = row.time
    return {
        "model": row.model,
        "method": row.method,
        "reason": row.reason or None,
        "measured": None if row.measured is None else asdict(row.measured),
        "peak_ratio": row.peak_ratio,
        "time": None if time is None else {**asdict(time), "ratio": time.ratio},
    }
