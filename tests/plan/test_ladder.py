"""Ladders of chains whose bounds count too much, and of chains whose pieces are in groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rewrite.plan.chain import Chain, Link, Value
from rewrite.plan.curve import ONCE
from rewrite.plan.ladder import RUNGS, Ladder
from rewrite.plan.measure import Footprint
from tests.plan.test_chain import chains


@st.composite
def loose(draw: st.DrawFn) -> Chain:
    """A chain whose options hold what they are given or not."""
    made = draw(chains())

    def varied(link: Link) -> Link:
        holds = [draw(st.booleans()) for _ in link.options]
        pairs = zip(link.options, holds, strict=True)
        return replace(link, options=tuple(replace(option, holds_inputs=(each,)) for option, each in pairs))

    return replace(made, links=tuple(map(varied, made.links)))


@st.composite
def grouped(draw: st.DrawFn) -> Chain:
    """A chain some of whose options are for groups of two or three."""
    made = draw(chains())

    def varied(link: Link) -> Link:
        groups = st.sampled_from([None, (2, ONCE), (3, ONCE)])
        return replace(
            link, options=(link.options[0], *(replace(each, group=draw(groups)) for each in link.options[1:]))
        )

    return replace(made, links=tuple(map(varied, made.links)))


@settings(max_examples=100, deadline=None)
@given(loose())
def test_a_lower_rung_has_no_larger_peak_than_a_higher_one_that_would_do(chain: Chain) -> None:
    ladder = Ladder(chain)
    targets = ladder.targets()
    plans = [ladder.simulated(rung) for rung in range(RUNGS + 1)]

    for rung, (above, here) in enumerate(pairwise(plans[:-1]), start=1):
        assert here.peak_bytes <= max(targets[rung], plans[RUNGS].peak_bytes)
        if above.peak_bytes <= targets[rung] and chain.is_loose:
            assert here == above


@settings(max_examples=100, deadline=None)
@given(loose())
def test_a_ladder_is_the_same_whatever_was_asked_before(chain: Chain) -> None:
    one, other = Ladder(chain), Ladder(chain)
    upwards = [one.simulated(rung) for rung in range(RUNGS, -1, -8)]
    downwards = [other.simulated(rung) for rung in range(0, RUNGS + 1, 8)]

    assert upwards == downwards[::-1]


@settings(max_examples=100, deadline=None)
@given(grouped(), st.integers(40, 260))
def test_a_plan_takes_options_of_one_way_to_group(chain: Chain, budget: int) -> None:
    found = chain.best(budget)
    if found is None:
        return
    groups = {link.options[option].group for link, option in zip(chain.links, found.choice, strict=True)}
    assert len(groups - {None}) <= 1
    assert found.peak_bytes <= budget


def test_what_hardly_counts_makes_no_chain_loose() -> None:
    def chain(held_bytes: int) -> Chain:
        options = (
            Footprint(1000, 1000, 1000, (True,), (False,)),
            Footprint(0, 1000, 1000, (False,), (False,), seconds=1.0),
        )
        return Chain((Link(options, (0,), (1,)),), (Value(held_bytes, 0, None, (0,)), Value(1, 1, 0, ())), 1000)

    assert not chain(1).is_loose
    assert chain(1000).is_loose
