from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rewrite.plan.globs import globs
from rewrite.selectors import matches


def test_numbers_in_a_row_are_one_glob_for_each_ten() -> None:
    assert globs(["layers.3"]) == ("layers.3",)
    assert globs([f"layers.{number}" for number in (0, 1, 2, 5)]) == ("layers.[0-2]", "layers.5")
    assert globs([f"m.h.{number}" for number in range(8, 24)]) == ("m.h.[8-9]", "m.h.1[0-9]", "m.h.2[0-3]")
    assert globs(["a.mlp", "b.1"]) == ("a.mlp", "b.1")


@given(st.sets(st.integers(0, 130), min_size=1))
def test_they_match_these_and_no_other(numbers: set[int]) -> None:
    patterns = globs([f"m.layers.{number}" for number in sorted(numbers)])

    matched = {number for number in range(140) if any(matches(each, f"m.layers.{number}") for each in patterns)}
    assert matched == numbers
