"""The lengths of a dataset's sequences, from a text file of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rewrite.errors import InputError

SHARES = (0.5, 0.95, 1.0)
"""Parts of the dataset whose longest sequence a batch is found for."""


def read_lengths(path: Path) -> list[int]:
    """The whole numbers in a file, between spaces, commas or line ends, sorted; raises InputError."""
    try:
        words = path.read_text(encoding="utf-8").replace(",", " ").split()
    except (OSError, UnicodeDecodeError) as fault:
        told = fault.strerror if isinstance(fault, OSError) else "it is no text"
        raise InputError(f"--lengths {path}", f"cannot be read: {told}", "give a text file of numbers") from None
    wrong = next((word for word in words if not word.isdigit() or int(word) < 1), None)
    if wrong is not None or not words:
        cause = f"{wrong!r} is no length" if words else "it holds no lengths"
        raise InputError(f"--lengths {path}", cause, "write whole numbers from 1, one a line")
    return sorted(map(int, words))


def longest(lengths: Sequence[int]) -> list[tuple[float, int]]:
    """For each of `SHARES` of sorted `lengths` the longest sequence in it; equal ones once, with the largest share."""
    found: dict[int, float] = {}
    for share in SHARES:
        found[lengths[max(1, round(share * len(lengths))) - 1]] = share
    return [(share, length) for length, share in found.items()]


def lengths_text(path: Path, lengths: Sequence[int]) -> str:
    """What is told of them, in a sentence."""
    mean = sum(lengths) / len(lengths)
    padded = 1 - mean / lengths[-1]
    return (
        f"{path.name}: {len(lengths)} sequences of {lengths[0]} to {lengths[-1]}, {mean:.0f} in the mean; "
        f"all padded to the longest, {100 * padded:.0f}% of a batch would be padding. "
        "In brackets: how many are no longer"
    )
