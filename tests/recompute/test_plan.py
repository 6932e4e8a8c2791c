"""What a plan needs to make a value again, and how often each value is used."""

from __future__ import annotations

import torch

from rewrite.recompute.plan import Plan, Step


def nothing(*_: object) -> tuple[torch.Tensor, ...]:
    return ()


def step(*inputs: int, random: bool = False) -> Step:
    return Step(nothing, inputs, (True,) * len(inputs), random=random)


def plan(kept: tuple[int, ...] = ()) -> Plan:
    """Inputs 0 and 1; 2 of both, 3 (random) of 2, 4 of 2 and 3, 5 of 4 and of 1."""
    steps = {2: step(0, 1), 3: step(2, random=True), 4: step(2, 3), 5: step(4, 1)}
    return Plan("blocks.0", nothing, nothing, steps, frozenset(kept), frozenset(), lambda _: ())


def test_everything_from_the_inputs() -> None:
    whole = plan()
    assert whole.held == {0, 1}
    assert whole.needed((5,)) == {2, 3, 4, 5}
    assert whole.sources(5) == (~3, 0, 1)
    assert whole.sources(2) == (0, 1)
    assert whole.uses((4, 5)) == {0: 1, 1: 2, 2: 2, 3: 1, 4: 2, 5: 1}


def test_a_kept_value_ends_the_way_back() -> None:
    part = plan(kept=(3,))
    assert part.dropped == {2, 4, 5}
    assert part.held == {0, 1, 3}
    assert part.sources(5) == (0, 1, 3)
    assert plan(kept=(2, 3)).sources(4) == (2, 3)


def test_the_state_of_a_kept_node_is_made_from_its_inputs() -> None:
    part = plan(kept=(4,))
    assert part.needed((~4,)) == {2, 3, 4}
    assert part.sources(~4) == (~3, 0, 1)
    assert part.uses((~4,))[~4] == 1
    assert part.needed((4,)) == set()
