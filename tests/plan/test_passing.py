"""Plans that hold nothing of what passes between blocks: where they are offered, what they reach, what they cost."""

from __future__ import annotations

import copy
from typing import Any
from unittest import TestCase

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint
from rewrite.example import Example
from rewrite.memory.allocator import allocated_peak_bytes
from rewrite.memory.rates import PEAK_RATES
from rewrite.plan.apply import apply_points
from rewrite.plan.curve import EACH, ONCE, Point
from rewrite.plan.ladder import RUNGS
from rewrite.plan.model import PlanModel
from rewrite.plan.search import Search
from rewrite.plan.settled import spot_of
from rewrite.plan.trial import try_program
from rewrite.tags import PASSING, RELEASE
from tests.plan.models import Level, Stack, Twice, tokens
from tests.zoo.compare import assert_equal, run

DEEP, WIDTH = 12, 64
"""Blocks of small insides, so that what passes between them is most of what a recompute of each would hold."""


def deep() -> nn.Module:
    return Stack(*(16,) * DEEP, width=WIDTH)


def search(model: nn.Module, inputs: Any) -> Search:
    return Search(rewrite.capture(model, inputs), Example(model, (inputs,)))


def offered(model: PlanModel) -> dict[str, set[str]]:
    """For each block that may have what passes to it made again, in which ways."""
    found: dict[str, set[str]] = {}
    for piece, options in zip(model.pieces, model.options, strict=True):
        ways = {point.passing for point in options.points if point is not None and point.passing}
        if ways:
            found[piece.instance] = ways
    return found


def passed(found: Search, rung: int) -> list[str]:
    """What becomes of what is passed to each block, under the plan of a rung."""
    points = found.model.points(found.simulated(rung).choice)
    return [point.passing for point in points if point is not None and point.passing]


def test_a_deep_stack_holds_fewer_inputs_than_it_has_blocks_and_trains_the_same() -> None:
    model, inputs = deep(), tokens(64, 48)
    floor = search(model, inputs)
    lowest = floor.measured(floor.simulated(RUNGS).choice)
    passing_bytes = 64 * 48 * WIDTH * 4

    planned = rewrite.optimize(model, [Checkpoint(budget=lowest.peak_bytes)], example_inputs=inputs)

    blocks = rewrite.estimate(rewrite.optimize(model, "checkpoint", example_inputs=inputs), inputs)
    assert blocks.saved_bytes > DEEP * passing_bytes
    assert lowest.peak_bytes < blocks.peak_bytes - DEEP // 2 * passing_bytes
    assert allocated_peak_bytes(planned, inputs) <= lowest.peak_bytes * 1.001
    assert rewrite.verify(model, planned, inputs).passed
    assert any("hold nothing of what" in change.summary for change in rewrite.report(planned).changes)


def test_each_value_that_passes_is_made_again_once() -> None:
    """The forward of every block of a group but its last runs once more than without groups, and no other."""
    found = search(deep(), tokens(8, 48))
    pieces, options = found.model.pieces, found.model.options
    spots = [spot_of(piece) for piece in pieces]
    alone = [option.points[-1] if piece.call else None for piece, option in zip(pieces, options, strict=True)]
    within = [Point(point.keep, point.keep_state, point.again, 0, 0.0) if point else None for point in alone]
    grouped = [point and Point(point.keep, point.keep_state, point.again, 0, 0.0, passing=ONCE) for point in within]
    first = next(place for place, point in enumerate(grouped) if point)
    grouped[first] = within[first]

    flops = {
        name: try_program(apply_points(found.program.copy(), spots, points)[0], found.example).flops.total
        for name, points in (("within", within), ("grouped", grouped))
    }

    block = next(piece for piece in pieces if piece.call)
    forward = sum(work.flops * work.calls for effort in block.kind.profile.efforts.values() for work in effort.work)
    assert flops["grouped"] - flops["within"] == (DEEP - 1) * forward


def test_where_maps_are_large_what_passes_is_made_again_for_each_use() -> None:
    found = search(Level(), torch.randn(1, 3, 24, 24))

    assert EACH in passed(found, RUNGS)
    program, kept, after = found._try(found.simulated(RUNGS).choice)
    assert [each.again for each in kept if each.passing] == [("stem", "blocks_0")]
    tagged = {node.name for node in program.regions[0].nodes() if PASSING in node.meta and RELEASE in node.meta}
    assert tagged == {"stem", "blocks_0"}
    assert after.peak_bytes == found.measured(found.simulated(RUNGS).choice).peak_bytes


def test_a_run_for_each_use_is_measured_as_the_emitted_blocks_are() -> None:
    """Predicted recompute, priced by operators, and bytes against a run of the whole model."""
    found = search(Level(), torch.randn(1, 3, 24, 24))
    simulated = found.simulated(RUNGS)
    measured = found.measured(simulated.choice)

    assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)
    again = measured.flops.total - found.before.flops.total
    assert simulated.seconds >= again / PEAK_RATES["cpu"].flops


@pytest.mark.parametrize("blocks", [2, 3])
def test_gradients_are_those_of_the_untouched_model_at_the_lowest_peak(blocks: int) -> None:
    model, inputs = Level(blocks), torch.randn(1, 3, 24, 24)
    found = search(model, inputs)
    budget = found.measured(found.simulated(RUNGS).choice).peak_bytes

    planned = rewrite.optimize(copy.deepcopy(model), [Checkpoint(budget=budget)], example_inputs=inputs)

    for given in (inputs, torch.randn(2, 3, 20, 16)):
        assert_equal(run(model, {"images": given}), run(planned, {"images": given}))


class Skipping(nn.Module):
    """Blocks of which the second is also given, at the end, what the first made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Stack(16, 16, 16, width=WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = [self.inner.embedding(tokens)]
        for layer in self.inner.layers:
            hidden.append(layer(hidden[-1]))
        return (hidden[-1] * hidden[1]).mean()


class Writing(nn.Module):
    """Blocks that write to what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Added(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden * 2
        for layer in self.layers:
            hidden = layer(hidden) * 1
        return hidden.mean()


class Added(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.add_(1.0)


def test_what_others_read_too_is_held() -> None:
    assert "inner.layers.1" not in offered(search(Skipping(), tokens(8, 48)).model)


def test_blocks_with_hooks_called_twice_or_writing_to_their_input_hold_what_they_are_given() -> None:
    hooked = deep()
    hooked.layers[4].register_forward_hook(lambda *_: None)

    ways = offered(search(hooked, tokens(8, 48)).model)

    assert {f"layers.{number}" for number in (4, 5)}.isdisjoint(ways)
    assert {"layers.1", "layers.3", "layers.6"} <= ways.keys()
    assert offered(search(Twice(), torch.randn(4, 48, 32)).model) == {}
    assert offered(search(Writing(), torch.randn(8, 48, WIDTH)).model) == {}


def test_a_block_that_gets_a_hook_after_the_plan_is_in_no_group_and_the_user_is_told() -> None:
    model, inputs = deep(), tokens(8, 48)
    found = search(model, inputs)
    budget = found.measured(found.simulated(RUNGS).choice).peak_bytes
    planned = rewrite.optimize(model, [Checkpoint(budget=budget)], example_inputs=inputs)
    planned(inputs).backward()
    fired: list[int] = []
    for each in (model, planned):
        each.zero_grad()
        each.layers[3].register_forward_hook(lambda *_: fired.append(3))

    with TestCase().assertLogs("rewrite", "WARNING") as told:
        got = run(planned, {"tokens": inputs})

    assert fired == [3]
    assert "some blocks, and these have got hooks since" in told.output[0]
    assert_equal(run(model, {"tokens": inputs}), got)
