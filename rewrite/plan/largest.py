"""The largest batch, or sequence, whose step stays within a number of bytes, in few estimates."""

from __future__ import annotations

from collections.abc import Callable

MOST = 2**20
"""Where a search ends that nothing else bounds."""


def largest(peak_bytes: Callable[[int], int], limit_bytes: int, *, step: int = 1, most: int = MOST) -> int:
    """The largest multiple of `step` up to `most` whose peak is at most `limit_bytes`; 0 when there is none.

    Peaks must not fall as sizes grow. They are close to straight lines, so the next size tried is where a line through
    two known ones crosses the limit; where that does not halve what is left, the middle is tried.
    """
    known: dict[int, int] = {}
    low, high = 0, most // step + 1
    place = 1
    while high > 1:
        known[place] = peak_bytes(place * step)
        before = high - low
        low, high = (place, high) if known[place] <= limit_bytes else (low, place)
        if high - low <= 1:
            break
        crossing = _crossing(known, limit_bytes)
        if crossing is None or (len(known) > 2 and not low < crossing < high and 2 * (high - low) > before):
            crossing = (low + high) // 2 if high in known else 2 * low
        place = min(max(crossing, low + 1), high - 1)
    return low * step


def _crossing(known: dict[int, int], limit_bytes: int) -> int | None:
    """Where a line through the two known points nearest to the limit crosses it; None where there is no such line."""
    nearest = sorted(known, key=lambda place: abs(known[place] - limit_bytes))[:2]
    if len(nearest) < 2:
        return None
    one, two = sorted(nearest)
    rise = known[two] - known[one]
    return None if rise <= 0 else one + (limit_bytes - known[one]) * (two - one) // rise
