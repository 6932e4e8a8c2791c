"""The choice of what to keep of a block, against trying every choice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewrite.plan.curve import NOTHING, curve, solve
from rewrite.plan.price import STEP_SECONDS
from rewrite.plan.profile import NodeProfile, Profile

MILLISECOND = 1e-3


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Graphs of a few nodes, with values that must be kept, operators with states, and dropouts with masks."""
    nodes: list[NodeProfile] = []
    for place in range(draw(st.integers(1, 5))):
        sources = draw(st.sets(st.sampled_from([node.name for node in nodes]))) if nodes else set()
        state = draw(st.sampled_from([0, 0, 300, 800]))
        mask = draw(st.sampled_from([None, state // 4])) if state else None
        seconds = draw(st.integers(1, 40)) * MILLISECOND
        nodes.append(
            NodeProfile(
                f"n{place}",
                draw(st.sampled_from([0, 100, 256, 1024])),
                state,
                mask,
                needed=draw(st.booleans()),
                fixed=draw(st.integers(0, 5)) == 0,
                sources=tuple(sorted(sources)),
                seconds=seconds,
                masked_seconds=seconds / 8 if mask is not None else 0.0,
                mask_seconds=seconds / 16 if mask is not None else 0.0,
                replay_bytes=draw(st.sampled_from([0, 50])),
            )
        )
    return Profile(tuple(nodes))


def every_choice(profile: Profile) -> Iterator[tuple[int, float]]:
    """(kept bytes, seconds) of every choice of values and states to keep that leaves the backward what it needs."""
    names = [node.name for node in profile.nodes]
    stateful = [node.name for node in profile.nodes if node.state_bytes]
    for keep in _subsets(names):
        for state in _subsets(stateful):
            for unmasked in _subsets([node.name for node in profile.nodes if node.mask_bytes is not None]):
                cost = _cost(profile, keep, state, unmasked)
                if cost is not None:
                    yield cost


def _cost(profile: Profile, keep: set[str], state: set[str], unmasked: set[str]) -> tuple[int, float] | None:
    named = {node.name: node for node in profile.nodes}
    again: set[str] = set()
    wanted = [node.name for node in profile.nodes if node.needed and node.name not in keep]
    wanted += [node.name for node in profile.nodes if node.state_bytes and node.name not in state]
    while wanted:
        name = wanted.pop()
        if name in again:
            continue
        if named[name].fixed:
            return None
        again.add(name)
        wanted += [source for source in named[name].sources if source not in keep]
    kept, seconds = 0, 0.0
    for node in profile.nodes:
        kept += node.bytes * (node.name in keep) + node.kept_state_bytes * (node.name in state)
        seconds += node.mask_seconds * (node.name in state)
        if node.name in again:
            masked = node.mask_bytes is not None and node.name in state and node.name not in unmasked
            seconds += STEP_SECONDS + (node.masked_seconds if masked else node.seconds)
            kept += 0 if masked else node.replay_bytes
    return kept, seconds


def _subsets(names: list[str]) -> Iterator[set[str]]:
    for count in range(len(names) + 1):
        yield from map(set, itertools.combinations(names, count))


@settings(max_examples=60, deadline=None)
@given(profiles(), st.integers(0, 4000))
def test_a_solve_finds_what_trying_every_choice_finds(profile: Profile, limit: int) -> None:
    within = [seconds for kept, seconds in every_choice(profile) if kept <= limit]
    found = solve(profile, limit)

    if not within:
        assert found is None
        return
    assert found is not None
    assert found.kept_bytes <= limit
    assert found.seconds == pytest.approx(min(within), rel=1e-5, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(profiles())
def test_a_curve_runs_from_the_fewest_bytes_to_the_least_time_without_a_point_worse_than_another(
    profile: Profile,
) -> None:
    points = curve(profile)
    everything = list(every_choice(profile))

    assert points[0].kept_bytes == min(kept for kept, _ in everything)
    assert points[-1].seconds == pytest.approx(min(seconds for _, seconds in everything), rel=1e-5, abs=1e-9)
    for fewer, more in itertools.pairwise(points):
        assert fewer.kept_bytes < more.kept_bytes
        assert fewer.seconds > more.seconds


@settings(max_examples=20, deadline=None)
@given(profiles())
def test_a_curve_is_the_same_every_time(profile: Profile) -> None:
    assert curve(profile) == curve(profile)


def test_nothing_to_keep_is_a_curve_of_one_point() -> None:
    assert curve(Profile(())) == (NOTHING,)


def test_a_dropout_with_its_mask_kept_is_run_again_for_less_than_drawing_it_again() -> None:
    dense = NodeProfile("dense", 400, seconds=10 * MILLISECOND)
    dropout = NodeProfile(
        "dropout", 400, 400, 100, sources=("dense",), seconds=5 * MILLISECOND, masked_seconds=MILLISECOND / 4,
        replay_bytes=50,
    )  # fmt: skip
    square = NodeProfile("square", 400, needed=True, sources=("dropout",), seconds=MILLISECOND)
    profile = Profile((dense, dropout, square, NodeProfile("reads", 0, needed=True, sources=("square",))))

    found = solve(profile, 500)

    assert found is not None
    assert found.keep_state == {"dropout"}
    assert found.keep == {"square", "reads"}
