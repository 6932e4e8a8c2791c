"""Passes chosen together for a budget: what is chosen, what it costs, and that less memory is never more."""

from __future__ import annotations

import copy
import functools
import pickle
from itertools import pairwise

import pytest
import torch

import rewrite
from passes import Checkpoint, ChunkFFN, ChunkLoss
from rewrite.errors import BudgetError, InputError
from rewrite.memory.allocator import allocated_peak_bytes
from rewrite.plan.candidate import Mix
from rewrite.plan.joint import MIXING, SHARE, Joint, JointPlan
from rewrite.plan.ladder import RUNGS
from tests.memory.models import MODELS
from tests.plan.joint_models import INNER, Block, Language, batch, joint


@functools.cache
def model() -> Language:
    return Language()


TOLERANCE = SHARE * (MIXING + 1)
"""Of the untouched step's time: what a simpler pipeline may take more."""


class Unequal(Language):
    """Its second block is the widest."""

    def __init__(self) -> None:
        super().__init__(2)
        self.blocks[1] = Block(4 * INNER)


@functools.cache
def choices() -> Joint:
    return joint(model(), batch())


@functools.cache
def swept() -> list[JointPlan]:
    """Plans for budgets from the untouched peak to the lowest there is."""
    highest, lowest = choices().base.before.peak_bytes, choices().lowest_bytes
    return [choices().plan(highest - (highest - lowest) * step // 9) for step in range(10)]


def names(plan: JointPlan) -> list[str]:
    return [each.name for each in plan.passes]


def test_a_step_that_fits_gets_no_pass() -> None:
    plan = swept()[0]

    assert plan.passes == ()
    assert plan.spec == ""
    assert plan.time_ratio == 1


def test_less_memory_is_had_by_more_passes() -> None:
    plans = swept()

    assert {name for plan in plans for name in names(plan)} == {"checkpoint", "chunk-ffn", "chunk-loss"}
    assert names(plans[-1])[-1] == "checkpoint"
    assert "chunk-loss" in names(plans[-1])


def test_every_plan_fits_and_a_smaller_budget_never_has_a_larger_peak_nor_takes_less_time() -> None:
    plans = swept()

    assert all(plan.after.peak_bytes <= plan.keep.budget_bytes for plan in plans)
    for larger, smaller in pairwise(plans):
        assert smaller.after.peak_bytes <= larger.after.peak_bytes
        assert smaller.time_ratio >= larger.time_ratio - TOLERANCE


def test_a_plan_is_the_same_whatever_was_asked_before() -> None:
    plan = swept()[5]

    assert joint(model(), batch()).plan(plan.keep.budget_bytes).spec == plan.spec


@pytest.mark.thinned(3)
@pytest.mark.parametrize("step", [3, 6, 9])
def test_the_spec_makes_the_plan_again(step: int) -> None:
    plan = swept()[step]
    chosen = rewrite.optimize(model(), budget=_asked(plan), example_inputs=batch())
    pasted = rewrite.optimize(model(), plan.spec, example_inputs=batch())

    assert ",".join(map(str, rewrite.report(chosen).passes)) == plan.spec
    assert rewrite.estimate(chosen, batch()).peak_bytes == plan.after.peak_bytes
    assert rewrite.estimate(pasted, batch()).peak_bytes == plan.after.peak_bytes
    assert rewrite.report(pasted).changes == rewrite.report(chosen).changes


def _asked(plan: JointPlan) -> int:
    """The budget of the sweep that a plan is of; a mix may keep to less."""
    highest, lowest = choices().base.before.peak_bytes, choices().lowest_bytes
    return highest - (highest - lowest) * swept().index(plan) // 9


def test_a_planned_model_trains_as_the_untouched_one() -> None:
    planned = rewrite.optimize(model(), budget=choices().lowest_bytes + 20_000, example_inputs=batch())
    certificate = rewrite.verify(model(), planned, batch())

    assert certificate.passed
    assert rewrite.report(planned).numerics is rewrite.Numerics.REASSOCIATED


def test_with_exact_numerics_alone_nothing_is_chunked() -> None:
    exact = joint(model(), batch(), allow="exact")
    budget = (exact.base.before.peak_bytes + exact.lowest_bytes) // 2

    assert names(exact.plan(budget)) == ["checkpoint"]


def test_a_budget_too_small_names_the_lowest_peak_of_all_pipelines_and_what_holds_it() -> None:
    with pytest.raises(BudgetError) as raised:
        choices().plan(1000)
    floor = raised.value.lowest_bytes

    assert f"({floor} bytes)" in raised.value.cause
    assert "chunk-loss" in raised.value.cause
    assert "the largest there: " in raised.value.cause
    assert choices().plan(floor).after.peak_bytes == floor
    assert floor == pytest.approx(choices().lowest_bytes, rel=0.01)


def test_the_frontier_runs_from_the_untouched_step_to_the_lowest_peak() -> None:
    points = choices().frontier()

    assert (points[0].peak_bytes, points[0].time_ratio, points[0].spec) == (choices().base.before.peak_bytes, 1, "")
    assert points[-1].peak_bytes <= choices().lowest_bytes
    for higher, lower in pairwise(points[1:]):
        assert lower.peak_bytes < higher.peak_bytes
        assert lower.time_ratio >= higher.time_ratio - TOLERANCE
    assert choices().floor().peak_bytes == pytest.approx(choices().lowest_bytes, rel=0.01)


def test_a_frontier_ends_where_nothing_fits() -> None:
    frozen = Language().requires_grad_(False)
    frozen.blocks[-1].requires_grad_(True)
    found = joint(frozen, batch())

    assert found._least(found.off_bytes + 1, dict.fromkeys(range(len(found.candidates)), 0)) is None
    assert found.frontier()[0].peak_bytes == found.base.before.peak_bytes


def test_recompute_within_a_chunked_feed_forward_costs_time_and_a_chunked_loss_little() -> None:
    found = {str(each.passes[0]): each for each in choices().candidates if len(each.passes) == 1}
    untouched = choices().step_seconds
    feed_forward = next(each for name, each in found.items() if name.startswith("chunk-ffn"))
    loss = next(each for name, each in found.items() if name.startswith("chunk-loss"))

    assert feed_forward.step_seconds > 1.01 * untouched
    assert loss.step_seconds < feed_forward.step_seconds


def test_a_pass_can_stand_on_some_blocks_alone_and_that_plan_is_what_was_simulated() -> None:
    unequal = joint(Unequal(), batch())
    mix = max((each for each in unequal.candidates if isinstance(each, Mix)), key=lambda each: len(each.passes))
    partial = []
    for rung in range(RUNGS + 1):
        simulated = mix.ladder.simulated(rung)
        chunked = [each for each in mix.passes_of(simulated.choice) if isinstance(each, ChunkFFN)]
        if chunked and sum(len(each.select or ()) for each in chunked) == 1:
            partial.append(simulated)
    realized = mix.realized(partial[0])

    assert realized is not None
    at_most = realized.ladder.chain.best(partial[0].peak_bytes)
    assert at_most is not None
    mixed_seconds = mix.step_seconds + partial[0].seconds
    assert realized.step_seconds + at_most.seconds == pytest.approx(mixed_seconds, rel=1e-9)


def test_a_later_shape_gets_the_same_passes() -> None:
    planned = rewrite.optimize(model(), budget=choices().base.before.peak_bytes * 7 // 10, example_inputs=batch())
    before = rewrite.report(planned).passes
    planned(batch(2, 32)).backward()

    assert before
    assert rewrite.report(planned).passes == before


def test_without_example_inputs_the_first_training_step_decides() -> None:
    planned = rewrite.optimize(Language(), budget=choices().base.before.peak_bytes * 7 // 10)
    with torch.no_grad():
        planned.eval()(batch())
    assert rewrite.report(planned).passes == ()

    planned.train()(batch()).backward()
    assert rewrite.report(planned).passes


def test_a_model_that_waits_for_its_first_step_can_be_copied_and_pickled() -> None:
    waiting = rewrite.optimize(Language(), budget="1GiB")

    for other in (copy.deepcopy(waiting), pickle.loads(pickle.dumps(waiting))):
        other(batch()).backward()


def test_given_passes_come_first_and_are_not_offered_again() -> None:
    budget = choices().base.before.peak_bytes * 6 // 10
    planned = rewrite.optimize(model(), [ChunkLoss(chunks=4)], budget=budget, example_inputs=batch())
    found = rewrite.report(planned).passes

    assert found[0] == ChunkLoss(chunks=4)
    assert sum(isinstance(each, ChunkLoss) for each in found) == 1
    assert rewrite.estimate(planned, batch()).peak_bytes <= budget


def test_a_model_on_the_meta_device_is_planned_and_captured_once() -> None:
    with torch.device("meta"):
        there = Language()
    budget = choices().base.before.peak_bytes * 7 // 10
    planned = rewrite.optimize(there, budget=budget, example_inputs=batch())

    assert rewrite.estimate(planned, batch()).peak_bytes <= budget
    assert len(vars(planned)["forward"].rewriting.results) == 1


def test_optimizer_state_counts() -> None:
    budget = rewrite.estimate(model(), batch(), optimizer="adamw").peak_bytes * 7 // 10
    planned = rewrite.optimize(model(), budget=budget, optimizer="adamw", example_inputs=batch())

    assert rewrite.estimate(planned, batch(), optimizer="adamw").peak_bytes <= budget


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"budget": "8 apples"}, "is no number of bytes"),
        ({"budget": 0}, "is no number of bytes"),
        ({"budget": -5}, "is no number of bytes"),
        ({"budget": True}, "is no number of bytes"),
        ({"budget": 9, "allow": "sloppy"}, "choose one of exact, reassociated, reduced"),
        ({"budget": 9, "profile": "abacus"}, "device profile 'abacus'"),
        ({"budget": 9, "passes": [Checkpoint()]}, "leave checkpoint out"),
    ],
)
def test_what_makes_no_sense_is_told(arguments: dict[str, object], told: str) -> None:
    with pytest.raises(InputError) as raised:
        rewrite.optimize(model(), **arguments)  # type: ignore[arg-type]

    assert told in str(raised.value)


def test_a_profile_is_part_of_the_spec() -> None:
    found = rewrite.plan(model(), choices().base.before.peak_bytes * 9 // 10, batch(), profile="t4", allow="exact")

    assert found.passes == (Checkpoint(budget=found.budget_bytes, profile="t4"),)
    assert found.profile == "t4"


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "resnet"])
def test_budgets_of_real_architectures_are_kept_by_the_allocator(name: str) -> None:
    real, inputs = MODELS[name]()
    there = joint(real, inputs)
    highest, lowest = there.base.before.peak_bytes, there.plan(_floor(there)).after.peak_bytes
    plans = [there.plan(highest - (highest - lowest) * step // 11) for step in range(12)]

    for larger, smaller in pairwise(plans):
        assert smaller.after.peak_bytes <= larger.after.peak_bytes
    for plan in (plans[4], plans[8], plans[11]):
        planned = rewrite.optimize(real, plan.spec, example_inputs=inputs)
        assert allocated_peak_bytes(planned, inputs) == pytest.approx(plan.after.peak_bytes, rel=0.01)
        assert plan.after.peak_bytes <= highest - (highest - lowest) * plans.index(plan) // 11


def _floor(there: Joint) -> int:
    with pytest.raises(BudgetError) as raised:
        there.plan(1000)
    return raised.value.lowest_bytes
