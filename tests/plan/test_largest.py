"""The largest size within a limit, against trying all, and in few estimates."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rewrite.plan.largest import largest


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 1000), st.integers(1, 500), st.sampled_from([0, 0, 1, 3]), st.sampled_from([1, 8]),
    st.integers(0, 200_000), st.sampled_from([7, 50, 3000, 2**20]),
)  # fmt: skip
def test_it_is_the_last_that_fits(constant: int, slope: int, bend: int, step: int, limit: int, most: int) -> None:
    tried: list[int] = []

    def peak_bytes(size: int) -> int:
        tried.append(size)
        return constant + slope * size + bend * size * size

    found = largest(peak_bytes, limit, step=step, most=most)

    assert found % step == 0
    assert 0 <= found <= most
    assert found == 0 or peak_bytes(found) <= limit
    assert found + step > most or peak_bytes(found + step) > limit
    assert all(size % step == 0 and size <= most for size in tried)


def test_a_straight_line_takes_four_estimates() -> None:
    tried: list[int] = []

    def peak_bytes(size: int) -> int:
        tried.append(size)
        return 10_000 + 37 * size

    assert largest(peak_bytes, 10**7) == (10**7 - 10_000) // 37
    assert len(tried) <= 4


def test_jumps_are_met_in_few_estimates() -> None:
    tried: list[int] = []

    def peak_bytes(size: int) -> int:
        tried.append(size)
        return 1000 * (size // 100) + size

    assert largest(peak_bytes, 50_000) == 4599
    assert len(tried) <= 25


def test_peaks_that_do_not_grow_end_at_the_most() -> None:
    assert largest(lambda _: 5, 5, most=1000) == 1000
    assert largest(lambda _: 6, 5, most=1000) == 0
