"""Whole models planned to budgets: what is predicted, what is measured, and what is said when nothing fits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint
from rewrite.errors import BudgetError
from rewrite.example import Example
from rewrite.memory.allocator import allocated_peak_bytes
from rewrite.plan.ladder import RUNGS
from rewrite.plan.search import Search
from tests.memory.models import MODELS
from tests.plan.models import Bridged, Joined, Level, Stack, Twice, tokens
from tests.zoo.plain import PLAIN

Built = tuple[nn.Module, Any]


def zoo(name: str) -> Callable[[], Built]:
    entry = next(entry for entry in PLAIN if entry.name == name)
    return lambda: (entry.build(), entry.inputs(*entry.shapes[0]))


SMALL: dict[str, Callable[[], Built]] = {
    "equal-blocks": lambda: (Stack(64, 64, 64, 64), tokens()),
    "deep": lambda: (Stack(*(16,) * 12, width=64), tokens()),
    "large-maps": lambda: (Level(), torch.randn(1, 3, 24, 24)),
    "unequal-blocks": lambda: (Stack(16, 256, 64, 128), tokens()),
    "shared-block": lambda: (Stack(64, 64, 64, shared=True), tokens()),
    "called-in-two-ways": lambda: (Twice(), torch.randn(4, 48, 32)),
    "joined-again": lambda: (Joined(), torch.randn(4, 48, 32)),
    "no-blocks": lambda: (Bridged(), torch.randn(64, 48)),
}
LARGE: dict[str, Callable[[], Built]] = {
    **{name: MODELS[name] for name in ("bert", "gpt2", "llama", "t5", "resnet")},
    "unet": zoo("plain-unet"),
    "resnet-inplace": zoo("plain-resnet"),
}


def search(model: nn.Module, inputs: Any) -> Search:
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
    return Search(rewrite.capture(model, inputs), Example(model, args, kwargs))


@functools.cache
def searched(name: str) -> Search:
    """The search of a model by name, made once: plans do not depend on what was asked before."""
    return search(*{**SMALL, **LARGE}[name]())


def simulated_as_measured(found: Search, rungs: tuple[int, ...]) -> None:
    for rung in (0, *rungs):
        simulated = found.simulated(rung)
        measured = found.measured(simulated.choice)
        assert simulated.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", SMALL)
def test_the_simulated_peak_is_what_a_run_measures(name: str) -> None:
    simulated_as_measured(searched(name), (RUNGS // 2, RUNGS))


@pytest.mark.sweep
@pytest.mark.parametrize("name", LARGE)
def test_the_simulated_peak_of_a_real_architecture_is_what_a_run_measures(name: str) -> None:
    simulated_as_measured(searched(name), (RUNGS // 4, RUNGS // 2, 3 * RUNGS // 4, RUNGS))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", SMALL)
def test_every_budget_is_kept_and_a_smaller_one_never_has_a_larger_peak(name: str) -> None:
    sweep(searched(name), points=8)


@pytest.mark.sweep
@pytest.mark.parametrize("name", LARGE)
def test_every_budget_of_a_real_architecture_is_kept(name: str) -> None:
    sweep(searched(name), points=12)


def sweep(found: Search, points: int) -> None:
    """Budgets from the untouched peak to the floor: each is kept, peaks fall, seconds rise."""
    highest, floor = found.before.peak_bytes, found.measured(found.simulated(RUNGS).choice).peak_bytes
    assert floor < highest
    plans = [found.plan(highest - (highest - floor) * step // (points - 1)) for step in range(points)]

    assert all(plan.after.peak_bytes <= plan.budget_bytes for plan in plans)
    peaks = [plan.after.peak_bytes for plan in plans]
    assert peaks == sorted(peaks, reverse=True)
    seconds = [plan.seconds for plan in plans]
    assert seconds == sorted(seconds)
    assert plans[0].rung == 0
    assert not plans[0].kept


def test_a_planned_model_trains_as_the_untouched_one_within_the_budget() -> None:
    model, inputs = Stack(64, 64, 64, 64, width=64), tokens(8, 64)
    before = rewrite.estimate(model, inputs)
    budget = before.peak_bytes * 6 // 10

    planned = rewrite.optimize(model, [Checkpoint(budget=budget)], example_inputs=inputs)

    assert rewrite.estimate(planned, inputs).peak_bytes <= budget
    assert allocated_peak_bytes(planned, inputs) <= budget * 1.001
    assert rewrite.verify(model, planned, inputs).passed


def test_optimizer_state_counts_in_the_budget() -> None:
    model, inputs = Stack(64, 64, 64), tokens()
    budget = rewrite.estimate(model, inputs, optimizer="adamw").peak_bytes * 8 // 10

    planned = rewrite.optimize(model, [Checkpoint(budget=budget)], example_inputs=inputs, optimizer="adamw")

    assert rewrite.estimate(planned, inputs, optimizer="adamw").peak_bytes <= budget
    assert rewrite.report(planned).changes


def test_a_budget_that_holds_anyway_changes_nothing_and_says_so() -> None:
    planned = rewrite.optimize(Stack(64, 64), [Checkpoint(budget="1GiB")], example_inputs=tokens())

    (refusal,) = rewrite.report(planned).refusals
    assert "as it is, within the budget" in refusal.reason


def test_a_budget_too_small_names_the_lowest_peak_and_what_holds_it_and_that_peak_is_reached() -> None:
    found = searched("equal-blocks")
    with pytest.raises(BudgetError) as raised:
        found.plan(1000)

    floor = raised.value.lowest_bytes
    assert f"({floor} bytes)" in raised.value.cause
    where = found.measured(found.simulated(RUNGS).choice).peak
    assert f"reached in the backward of {where.module_path}, at {where.node}" in raised.value.cause
    assert where.largest[0].module_path in raised.value.cause
    assert raised.value.exit_code == 1
    assert found.plan(floor).after.peak_bytes == floor


def test_a_block_called_in_two_ways_is_planned_in_both() -> None:
    found = searched("called-in-two-ways")
    model, inputs = SMALL["called-in-two-ways"]()
    blocks = rewrite.optimize(model, "checkpoint", example_inputs=inputs)
    measured = found.measured(found.simulated(RUNGS).choice)

    assert measured.peak_bytes <= rewrite.estimate(blocks, inputs).peak_bytes
    kept = found.plan(measured.peak_bytes).kept
    assert sorted(path for each in kept for path in each.instances) == ["layers.0", "layers.0", "layers.1"]


def test_unequal_blocks_keep_unequal_things() -> None:
    found = searched("unequal-blocks")
    lowest = found.measured(found.simulated(RUNGS).choice).peak_bytes
    plan = found.plan(lowest + (found.before.peak_bytes - lowest) // 8)

    assert len({each.keep for each in plan.kept if not each.passing}) > 1


def test_equal_blocks_are_profiled_once_whatever_the_depth() -> None:
    deep = search(Stack(*[64] * 9), tokens())
    kinds = [len({piece.kind.key for piece in found.model.pieces}) for found in (searched("equal-blocks"), deep)]

    assert kinds[0] == kinds[1]


def test_a_call_without_gradients_is_not_planned() -> None:
    planned = rewrite.optimize(Stack(64, 64).eval(), [Checkpoint(budget=1000)], example_inputs=tokens())

    with torch.no_grad():
        planned(tokens())
