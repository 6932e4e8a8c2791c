"""Select modules by path: `encoder.layer.*.attention`, `**.mlp`, `layers.[0-11]`."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Sequence

_NUMBERS = re.compile(r"\[(!?)(?:(\d)-(\d{2,})|(\d{2,})-(\d+))\]")
"""A range of which an end has more digits than one."""


def matches(pattern: str, path: str) -> bool:
    """Whether `path` is selected, itself or through a module above it.

    `*`, `?` and `[...]` stand for characters of one component of a path, as in file names; `**` stands for any number
    of components. `[8-11]`, a range of which an end has more digits than one, stands for a number from 8 to 11, and
    `[!8-11]` for any other.
    """
    parts = path.split(".") if path else []
    return any(_match(pattern.split("."), parts[:length]) for length in range(1, len(parts) + 1))


def _match(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_match(pattern[1:], parts[skip:]) for skip in range(len(parts) + 1))
    return bool(parts) and _match_one(pattern[0], parts[0]) and _match(pattern[1:], parts[1:])


def _match_one(pattern: str, part: str) -> bool:
    if "[" not in pattern or not _NUMBERS.search(pattern):
        return fnmatch.fnmatchcase(part, pattern)
    expression, ranges = _with_numbers(pattern)
    found = expression.fullmatch(part)
    return found is not None and all(
        (first <= int(found[f"number{place}"]) <= last) == inside for place, (first, last, inside) in enumerate(ranges)
    )


@functools.cache
def _with_numbers(pattern: str) -> tuple[re.Pattern[str], tuple[tuple[int, int, bool], ...]]:
    """An expression with a group for each range of numbers; first, last, and whether the number is to be among them."""
    ranges: list[tuple[int, int, bool]] = []
    expression, end = "", 0
    for found in _NUMBERS.finditer(pattern):
        first, last = (int(each) for each in found.groups()[1:] if each)
        expression += _translated(pattern[end : found.start()]) + rf"(?P<number{len(ranges)}>\d+)(?!\d)"
        ranges.append((first, last, not found[1]))
        end = found.end()
    return re.compile(expression + _translated(pattern[end:])), tuple(ranges)


def _translated(pattern: str) -> str:
    return fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")
