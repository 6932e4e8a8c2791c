"""Peak against time as a picture, one panel a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rewrite import InputError
from tests.bench.methods import OURS
from tests.bench.results import Row

PANEL_INCHES = (7.0, 5.0)
DOTS_PER_INCH = 120


def check_picture() -> None:
    """Raise InputError where the library that draws is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError("--png", "needs matplotlib, which is not installed", "pip install -e '.[test]'") from error


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture of every row with both a peak and a time to `path`, PNG."""
    check_picture()
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.peak_ratio and row.time]
    models = list(dict.fromkeys(row.model for row in shown))
    across = min(3, max(1, len(models)))
    down = max(1, math.ceil(len(models) / across))
    figure = Figure(figsize=(PANEL_INCHES[0] * across, PANEL_INCHES[1] * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for panel in panels[len(models) :]:
        panel.set_visible(False)
    for model, panel in zip(models, panels, strict=False):
        _draw_model(panel, model, [row for row in shown if row.model == model])
    figure.savefig(path, dpi=DOTS_PER_INCH, format="png")


def _draw_model(panel: Any, model: str, rows: Sequence[Row]) -> None:
    panel.set(title=model, xlabel="peak above parameters, of eager's", ylabel="CPU time of a step, of eager's")
    panel.grid(alpha=0.3)
    for label, color, mine in (("others", "tab:gray", False), ("this project", "tab:blue", True)):
        family = [row for row in rows if row.method.startswith(OURS) == mine]
        if not family:
            continue
        places = {row.method: place(row) for row in family}
        panel.scatter(*zip(*places.values(), strict=True), color=color, s=18, label=label)
        panel.step(*zip(*frontier(list(places.values())), strict=True), where="post", color=color, lw=1, alpha=0.6)
        for method, point in places.items():
            panel.annotate(method, point, (3, 3), textcoords="offset points", fontsize=6, color=color)
    panel.margins(x=0.2)  # room for the names
    panel.legend(loc="best", fontsize=8)


def place(row: Row) -> tuple[float, float]:
    """(peak, time), both of eager's."""
    assert row.peak_ratio
    assert row.time
    return row.peak_ratio, row.time.ratio


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in both, by rising first coordinate."""
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best
