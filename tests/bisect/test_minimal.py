"""What the search finds, and in how many trials, on properties of sets made up for it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from rewrite.bisect.globs import Globs
from rewrite.bisect.minimal import ddmin, smallest
from rewrite.selectors import matches


class Counted:
    """A property of a list, and how often it was asked for."""

    def __init__(self, holds: Callable[[set[object]], bool]) -> None:
        self.holds, self.count = holds, 0

    def __call__(self, kept: list[object]) -> bool:
        self.count += 1
        return self.holds(set(kept))


@pytest.mark.parametrize("needed", [{0}, {63}, {5, 40}, {0, 1, 2}, set(range(0, 64, 7)), set(range(64))])
def test_exactly_what_is_needed_is_found(needed: set[object]) -> None:
    holds = Counted(lambda kept: needed <= kept)
    assert set(ddmin(range(64), holds)) == needed
    assert holds.count <= 4 * 64


def test_one_of_many_takes_trials_by_the_logarithm() -> None:
    holds = Counted(lambda kept: 700 in kept)
    assert ddmin(range(1024), holds) == [700]
    assert holds.count <= 2 * 10


def test_a_property_that_more_can_spoil_still_ends_with_no_element_to_spare() -> None:
    def holds(kept: set[object]) -> bool:
        return len(kept) in (12, 9, 7, 4)

    found = ddmin(range(12), Counted(holds))
    assert holds(set(found))
    assert not any(holds(set(found) - {each}) for each in found)


@pytest.mark.parametrize("seed", range(20))
def test_random_properties_leave_no_element_to_spare(seed: int) -> None:
    draw = random.Random(seed)
    paths = [f"a.{draw.randrange(4)}.{draw.choice('xyz')}.{number}" for number in range(40)]
    needed = [set(draw.sample(paths, draw.randint(1, 6))) for _ in range(3)]

    def holds(kept: list[str]) -> bool:
        return any(each <= set(kept) for each in needed)

    found = smallest(paths, holds)
    assert holds(found)
    assert not any(holds([path for path in found if path != each]) for each in found)


def test_modules_are_tried_before_their_parts() -> None:
    paths = [f"layer.{layer}.{part}.{op}" for layer in range(12) for part in ("attention", "mlp") for op in "abcd"]
    asked: list[list[str]] = []

    def holds(kept: list[str]) -> bool:
        asked.append(kept)
        return "layer.7.mlp.c" in kept

    assert smallest(paths, holds) == ["layer.7.mlp.c"]
    assert len(asked[0]) == 48
    assert len(asked) <= 16
    sizes = [len(kept) for kept in asked]
    assert [size < 8 for size in sizes] == sorted(size < 8 for size in sizes)


@pytest.mark.parametrize(
    ("chosen", "selectors"),
    [
        (["b.0.x", "b.1.x", "b.2.x"], ("b.*.x",)),
        (["b.0.x", "b.0.y.p", "b.0.y.q"], ("b.0",)),
        (["b.0.x", "b.1.y.q"], ("b.0.x", "b.1.y.q")),
        (["b.0.y.p", "b.1.y.p", "b.1.y.q", "b.2.y.p"], ("b.*.y.p", "b.1.y")),
        (["head"], ("head",)),
        (["only.3.x", "only.3.z"], ("only.3",)),
    ],
)
def test_few_selectors_say_what_was_chosen_and_nothing_else(chosen: list[str], selectors: tuple[str, ...]) -> None:
    paths = [f"b.{number}.{rest}" for number in range(3) for rest in ("x", "y.p", "y.q")] + ["head"]
    paths += ["only.3.x", "only.3.z", "only.w"]
    found = Globs(paths).of(chosen)
    assert found == selectors
    assert {path for path in paths if any(matches(each, path) for each in found)} == set(chosen)


def test_a_star_is_not_taken_where_a_name_stands_among_the_numbers() -> None:
    paths = ["b.0.x", "b.1.x", "b.last.x"]
    assert Globs(paths).of(["b.0.x", "b.1.x"]) == ("b.0", "b.1")
