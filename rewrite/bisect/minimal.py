"""The smallest part of a set that has a property, found by trying subsets. Knows nothing of models.

Delta debugging (Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, IEEE TSE 28(2), 2002):
`ddmin` tries halves, then quarters and their complements, until no single element can be left out. Elements with paths
go from coarse to fine, as in hierarchical delta debugging (Misherghi and Su, HDD, ICSE 2006): whole modules first, then
the parts of those that are needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Unit = tuple[str, ...]


def ddmin(items: Sequence[Item], holds: Callable[[list[Item]], bool]) -> list[Item]:
    """A part of `items` for which `holds`, and no longer does when any one element is left out.

    `holds` is known to be true of `items` and false of nothing at all. After an element was left out, the round goes on
    behind it rather than from the beginning: when leaving out more never helps, the trials are linear in the items that
    stay, not quadratic.
    """
    items, pieces = list(items), 2
    while len(items) >= 2:
        parts = list(_parts(items, pieces))
        subset = next((part for part in parts if holds(part)), None)
        if subset is not None:
            items, pieces = subset, 2
            continue
        left = _without_needless(parts, holds)
        items = [item for part in left for item in part]
        if all(len(part) == 1 for part in left):
            break
        pieces = min(2 * len(left), len(items))
    return items


def smallest(paths: Sequence[str], holds: Callable[[list[str]], bool]) -> list[str]:
    """The same for dotted paths: first those of one module are kept or left out together, then those of its parts."""
    units: list[Unit] = [tuple(paths)]
    depth = 0
    while any(len(unit) > 1 for unit in units):
        depth += 1
        finer = [part for unit in units for part in _split(unit, depth)]
        if len(finer) > len(units):
            finer = ddmin(finer, lambda chosen: holds(_in_order(paths, chosen)))
        units = finer
    return _in_order(paths, units)


def _parts(items: list[Item], pieces: int) -> Iterator[list[Item]]:
    bounds = [len(items) * number // pieces for number in range(pieces + 1)]
    yield from (items[start:end] for start, end in itertools.pairwise(bounds) if end > start)


def _without_needless(parts: list[list[Item]], holds: Callable[[list[Item]], bool]) -> list[list[Item]]:
    """`parts` without those that can go, tried in turn until each of the rest was tried without success."""
    place = tried = 0
    while len(parts) > 1 and tried < len(parts):
        place %= len(parts)
        rest = parts[:place] + parts[place + 1 :]
        if holds([item for part in rest for item in part]):
            parts, tried = rest, 0
            continue
        place, tried = place + 1, tried + 1
    return parts


def _split(unit: Unit, depth: int) -> Iterator[Unit]:
    """The paths of a unit by their first components."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for path in unit:
        groups.setdefault(tuple(path.split(".")[:depth]), []).append(path)
    yield from map(tuple, groups.values())


def _in_order(paths: Sequence[str], units: Sequence[Unit]) -> list[str]:
    wanted = {path for unit in units for path in unit}
    return [path for path in paths if path in wanted]
