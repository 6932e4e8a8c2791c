"""Module paths as few globs."""

from __future__ import annotations

from collections.abc import Sequence


def globs(paths: Sequence[str]) -> tuple[str, ...]:
    """Globs that match exactly `paths`: numbers in a row become `layers.[0-7]`; other paths stay as they are."""
    numbers: dict[str, list[int]] = {}
    found: list[str] = []
    for path in paths:
        stack, _, last = path.rpartition(".")
        if stack and last.isdigit():
            numbers.setdefault(stack, []).append(int(last))
        else:
            found.append(path)
    for stack, members in numbers.items():
        found += [f"{stack}.{each}" for each in _ranges(sorted(set(members)))]
    return tuple(found)


def _ranges(numbers: Sequence[int]) -> list[str]:
    """Numbers in a row of one ten as `1[2-5]`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1 and number // 10 == runs[-1][0] // 10:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [_range(run[0], run[-1]) for run in runs]


def _range(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first // 10 or ''}[{first % 10}-{last % 10}]"
