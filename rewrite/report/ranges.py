"""Many module paths as few words: `model.layers.0-31`."""

from __future__ import annotations

from collections.abc import Iterable


def fold_paths(paths: Iterable[str]) -> str:
    """Paths that differ in their last number as ranges, the rest as they are; the root is `(root)`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for path in paths:
        head, number, tail = split_at_last_number(path)
        groups.setdefault((head, tail), []).extend([] if number is None else [number])
    return ", ".join(f"{head}{ranges_text(numbers)}{tail}" or "(root)" for (head, tail), numbers in groups.items())


def natural_order(path: str) -> list[tuple[bool, int, str]]:
    """A sort key under which `layers.2` comes before `layers.10`."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in path.split(".")]


def split_at_last_number(path: str) -> tuple[str, int | None, str]:
    """`a.3.b` as `("a.", 3, ".b")`; a path without a number as `(path, None, "")`."""
    parts = path.split(".")
    for position in range(len(parts) - 1, -1, -1):
        if parts[position].isdigit():
            head = "".join(f"{part}." for part in parts[:position])
            tail = "".join(f".{part}" for part in parts[position + 1 :])
            return head, int(parts[position]), tail
    return path, None, ""


def ranges_text(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2,5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
