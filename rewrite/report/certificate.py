"""A parity certificate as text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from rewrite.report.columns import crop, wrapped_behind

if TYPE_CHECKING:
    from rewrite.certificate import Certificate, Row

ROWS = 20
"""How many rows are printed where not all are asked for: failures first, then the largest differences."""


def certificate_lines(certificate: Certificate, model: str, spec: str, width: int, *, full: bool) -> Iterator[Text]:
    """Verdict, what was compared, and the rows that say most."""
    yield Text(crop(f"{model}  {spec}".rstrip(), width), "bold")
    verdict, style = ("PASS", "bold green") if certificate.passed else ("FAIL", "bold red")
    for line in wrapped_behind(verdict, certificate.summary, 11, width):
        line.stylize(style, 0, len(verdict))
        yield line
    yield Text(f"promise    {certificate.numerics}")
    for case in certificate.cases:
        yield from wrapped_behind("step", case, 11, width)
    for case in certificate.skipped:
        yield from wrapped_behind("skipped", case, 11, width)
    yield Text("")
    yield from counts(certificate)
    rows = sorted(certificate.rows, key=lambda row: (row.passed, row.equal, -row.max_abs))
    shown = rows if full else [row for row in rows if not (row.passed and row.equal)][:ROWS]
    if shown:
        yield Text("")
        yield Text(f"{'':5} {'max abs':>10} {'max rel':>10} {'allowed':>10}  value", "bold")
    for row in shown:
        yield _row_text(row, width)
    if len(shown) < sum(not (row.passed and row.equal) for row in rows):
        yield Text("(more differ; --full prints every row)")


def counts(certificate: Certificate) -> Iterator[Text]:
    """How many values of each kind were compared, and how many were bit-equal."""
    for kind in dict.fromkeys(row.kind for row in certificate.rows):
        rows = [row for row in certificate.rows if row.kind == kind]
        equal, passed = sum(row.equal for row in rows), sum(row.passed for row in rows)
        line = f"{kind:<10} {len(rows):>5} compared  {equal:>5} bit-equal  {len(rows) - passed:>5} failed"
        yield Text(line, "red" if passed < len(rows) else "")


def _row_text(row: Row, width: int) -> Text:
    mark = "same" if row.equal else "ok" if row.passed else "FAIL"
    line = f"{mark:5} {row.max_abs:>10.3g} {row.max_rel:>10.3g} {row.tolerance:>10.3g}  "
    name = " ".join(part for part in (row.kind, row.name, f"({row.case})" if row.case else "", row.note) if part)
    return Text(line + crop(name, max(12, width - len(line))), "red" if not row.passed else "")
