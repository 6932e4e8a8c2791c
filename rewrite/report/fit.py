"""How large a batch or sequence fits, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.text import Text

from rewrite.report.columns import crop, wrapped
from rewrite.report.sizes import size_text

if TYPE_CHECKING:
    from rewrite.plan.fit import Fit


@dataclass(frozen=True)
class FitRow:
    """One question and its answer."""

    label: str
    """What is fixed: `sequence 512`, `batch 4`."""
    fit: Fit


@dataclass(frozen=True)
class FitTable:
    """The sizes that fit a model's step into a memory."""

    model: str
    unit: str
    """What is as large as it can be: `batch` or `sequence`."""
    memory_bytes: int
    device: str
    optimizer: str
    rows: tuple[FitRow, ...]
    lengths: str = ""
    """A sentence about the dataset's lengths, where they were given."""


def fit_lines(table: FitTable, width: int) -> Iterator[Text]:
    """A line for each question, then the passes of the best plans."""
    yield Text(crop(f"--- {table.model}", width), "bold")
    yield Text(f"largest {table.unit} in {size_text(table.memory_bytes)}", "bold")
    if table.lengths:
        yield from wrapped(table.lengths, width)
    yield Text("")
    column = max(len(row.label) for row in table.rows)
    yield Text(f"{'':<{column}} {'no passes':>10} {'peak':>9} {'best plan':>10} {'peak':>9} {'time':>6}")
    for row in table.rows:
        yield Text(_row(row, column))
    yield Text("")
    for label, told in _specs(table.rows):
        yield Text(f"{label}: {told}")
    yield from wrapped(f"device {table.device}, optimizer {table.optimizer}; predicted, nothing was allocated", width)


def _row(row: FitRow, column: int) -> str:
    fit = row.fit
    plain = f"{fit.plain:>10} {size_text(fit.plain_peak_bytes) if fit.plain else '-':>9}"
    planned = f"{fit.planned:>10} {size_text(fit.planned_peak_bytes) if fit.planned else '-':>9}"
    return f"{row.label:<{column}} {plain} {planned} {f'x{fit.time_ratio:.2f}' if fit.planned else '-':>6}"


def _specs(rows: Sequence[FitRow]) -> Iterator[tuple[str, str]]:
    """The plan of each row; rows with the same plan together."""
    labels: dict[str, list[str]] = {}
    for row in rows:
        if not row.fit.planned:
            text = "not even the smallest step fits, whatever the passes"
        else:
            text = row.fit.spec or "no pass makes it larger"
        labels.setdefault(text, []).append(row.label)
    for text, told in labels.items():
        yield ", ".join(told), text
