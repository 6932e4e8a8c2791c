from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewrite.plan.chain import Chain, Link, Value
from rewrite.plan.measure import Footprint


@st.composite
def footprints(draw: st.DrawFn) -> tuple[Footprint, ...]:
    """Options of one piece: the first keeps the most and recomputes nothing."""
    kept = draw(st.integers(0, 40))
    options = [Footprint(kept, kept + draw(st.integers(0, 9)), kept + draw(st.integers(0, 20)), (True,), (False,))]
    for _ in range(draw(st.integers(0, 3))):
        less = draw(st.integers(0, kept))
        within = less + draw(st.integers(0, 9)), kept + draw(st.integers(0, 20))
        options.append(Footprint(less, *within, (True,), (False,), draw(st.integers(1, 9)) / 8))
    return tuple(options)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """A few unequal pieces in a row, some of which read a value from further back."""
    count = draw(st.integers(1, 4))
    values, links = [Value(3, 3, None, (0,))], []
    readers: dict[int, list[int]] = {number: [number + 1] for number in range(count - 1)}
    if count > 2 and draw(st.booleans()):
        readers[0].append(count - 1)  # a skip connection
    for number in range(count):
        values.append(Value(draw(st.integers(1, 9)), 4, number, tuple(readers.get(number, ()))))
        inputs = (number, 1) if number in readers.get(0, ())[1:] else (number,)
        options = draw(footprints())
        links.append(Link(options, inputs, (number + 1,)))
    gradients = tuple(2 * (count - number) for number in range(count))
    return Chain(tuple(links), tuple(values), draw(st.integers(0, 50)), 10, gradients)


def every_choice(chain: Chain) -> list[tuple[int, ...]]:
    return list(itertools.product(*[range(len(link.options)) for link in chain.links]))


@settings(max_examples=150, deadline=None)
@given(chains(), st.integers(0, 260))
def test_the_best_choice_is_that_of_trying_all(chain: Chain, budget: int) -> None:
    simulated = [chain.simulate(choice) for choice in every_choice(chain)]
    within = [each for each in simulated if each.peak_bytes <= budget]
    found = chain.best(budget)

    if not within:
        assert found is None
        return
    assert found is not None
    assert found.peak_bytes <= budget
    assert found.seconds == pytest.approx(min(each.seconds for each in within))


@settings(max_examples=100, deadline=None)
@given(chains())
def test_the_lowest_peak_is_that_of_trying_all(chain: Chain) -> None:
    assert chain.lowest().peak_bytes == min(chain.simulate(choice).peak_bytes for choice in every_choice(chain))


@settings(max_examples=100, deadline=None)
@given(chains(), st.integers(0, 260), st.integers(0, 60))
def test_less_memory_never_takes_less_time(chain: Chain, budget: int, less: int) -> None:
    tight, loose = chain.best(budget - less), chain.best(budget)

    assert tight is None or (loose is not None and loose.seconds <= tight.seconds + 1e-9)


def test_runs_of_one_block_take_the_same_option() -> None:
    options = (Footprint(10, 10, 12, (True,), (False,)), Footprint(1, 5, 12, (True,), (False,), 1.0))
    chain = Chain(tuple(Link(options, tied="shared") for _ in range(3)))

    assert chain.best(32) is not None
    assert len(set(chain.best(25).choice)) == 1  # type: ignore[union-attr]


def test_identical_pieces_by_the_hundred_are_planned_at_once() -> None:
    options = tuple(
        Footprint(100 - 9 * step, 100 - 9 * step, 130, (True,), (False,), step * step / 7) for step in range(11)
    )
    values = tuple(Value(5, 5, number, (number + 1,) if number < 199 else ()) for number in range(200))
    chain = Chain(
        tuple(Link(options, (number - 1,) if number else (), (number,)) for number in range(200)),
        values,
    )
    most, least = chain.simulate([0] * 200).peak_bytes, chain.lowest().peak_bytes
    found = chain.best((most + least) // 2)

    assert found is not None
    assert found.peak_bytes <= (most + least) // 2
    assert len(set(found.choice)) <= 3
