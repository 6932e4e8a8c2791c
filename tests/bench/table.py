"""Rows as a table of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from rewrite.report.sizes import flops_text, size_text
from tests.bench.results import Row
from tests.bench.step import Measured

COLUMNS = (
    "method", "peak", "of eager", "smaller", "time", "activations", "saved", "resident set", "work", "preparation",
    "gradients", "buffers",
)  # fmt: skip
EXPLAINED = (
    "peak: allocator, above parameters, gradients included; activations: above the gradients too; saved: left by the "
    "forward; resident set: what it rose by; time: CPU time of a step to eager's, median of pairs (eager's own row is "
    "the noise); work: floating point operations; gradients, buffers: relative L2 difference from eager's, which "
    "is that of the dropout masks where a method draws them in another order"
)


def table(model: str, rows: Sequence[Row]) -> Table:
    """All rows of one model."""
    made = Table(title=model, title_justify="left", box=None, pad_edge=False)
    for column in COLUMNS:
        made.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in rows:
        if row.measured is not None:
            made.add_row(row.method, *_cells(row, row.measured))
    return made


def reasons(rows: Sequence[Row]) -> list[str]:
    """A line for each row that lacks something."""
    return [f"{row.method}: {row.reason}" for row in rows if row.reason]


def _cells(row: Row, measured: Measured) -> list[str]:
    memory, numbers, ratio = measured.memory, measured.numbers, row.peak_ratio
    rise = memory.resident_set_rise_bytes
    return [
        size_text(memory.peak_bytes),
        f"{ratio:.3f}" if ratio else "",
        f"{1 / ratio:.2f}x" if ratio else "",
        f"{row.time.ratio:.3f}x" if row.time else "",
        size_text(memory.activation_peak_bytes),
        size_text(memory.saved_bytes),
        "" if rise is None else size_text(rise),
        flops_text(measured.flops),
        f"{measured.preparation_seconds:.1f} s",
        error_text(numbers.gradient_error),
        error_text(numbers.buffer_error),
    ]


def error_text(error: float) -> str:
    """`equal`, a power of ten, or that there is nothing to compare."""
    if error == 0:
        return "equal"
    return f"{error:.0e}" if math.isfinite(error) else "differ"
