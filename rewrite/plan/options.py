"""What pieces can keep."""

from __future__ import annotations

from dataclasses import dataclass

from rewrite.plan.curve import Point
from rewrite.plan.measure import Footprint


@dataclass(frozen=True)
class Options:
    """What pieces of one kind can keep: for each option the point of the curve, None to run as they are."""

    points: tuple[Point | None, ...]
    footprints: tuple[Footprint, ...]
    step_seconds: float = 0.0
    """Of the piece's forward and backward as it is."""
