"""The largest batch, or sequence, whose step stays within a number of bytes, in few estimates."""

from __future__ import annotations

from collections.abc import Callable

MOST = 2**20
"""Where a search ends that nothing else bounds."""
NUDGE = 32
"""The second size tried is one part in so many from the first, which a line then goes through."""


def largest(
    peak_bytes: Callable[[int], int], limit_bytes: int, *, step: int = 1, most: int = MOST, near: int = 0
) -> int:
    """The largest multiple of `step` up to `most` whose peak is at most `limit_bytes`; 0 when there is none.

    Peaks must not fall as sizes grow. They are close to straight lines, so the next size tried is where a line through
    two known ones crosses the limit; where that is next to a known one, ever further from it, and where it does not
    halve what is left, the middle. `near` is a guess to begin with.
    """
    known: dict[int, int] = {}
    low, high, jump = 0, most // step + 1, 1
    place = min(max(near // step, 1), high - 1)
    while high - low > 1:
        known[place] = peak_bytes(place * step)
        fits, before = known[place] <= limit_bytes, high - low
        low, high = (place, high) if fits else (low, place)
        slow = low in known and high in known and 2 * (high - low) > before
        line = _crossing(known, low, high, limit_bytes)
        place = line if line is not None else place + (1 + place // NUDGE if fits else -1 - place // NUDGE)
        if slow:
            place = (low + high) // 2
        elif low + jump <= place <= high - jump:
            jump = 1
        else:
            place, jump = (low + jump if fits else high - jump), 2 * jump
        place = min(max(place, low + 1), high - 1)
    return low * step


def _crossing(known: dict[int, int], low: int, high: int, limit_bytes: int) -> int | None:
    """Where a line through known points crosses the limit, those around it or the two outermost; None without one."""
    one, two = (low, high) if low in known and high in known else (sorted(known)[-2:] * 2)[:2]
    if high in known and low not in known:
        one, two = (sorted(known)[:2] * 2)[:2]
    rise = known[two] - known[one]
    return None if rise <= 0 else one + (limit_bytes - known[one]) * (two - one) // rise
