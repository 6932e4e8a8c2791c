"""The zoo trains, repeats itself, and its comparison notices what it must."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.zoo import BAR, ZOO
from tests.zoo.compare import Run, assert_equal, run
from tests.zoo.plain import BranchingNetwork

LIMIT_BYTES = 2 * 1000 * 1000
STOCHASTIC = sorted(set(ZOO) - {"mamba", "mamba2", "sam-mask-decoder", "hf-resnet"})


@pytest.mark.parametrize("name", ZOO)
def test_trains_with_a_finite_loss_and_the_same_numbers_twice(name: str) -> None:
    entry = ZOO[name]
    model = entry.build()
    (batch, length), mask = entry.shapes[0], entry.masks[0]
    first = run(model, entry.inputs(batch, length, mask), seed=1)
    assert torch.isfinite(first.loss).all()
    assert any(grad is not None and grad.abs().sum() > 0 for grad in first.grads.values())
    assert sum(p.numel() * p.element_size() for p in model.parameters()) <= LIMIT_BYTES
    assert_equal(first, run(entry.build(), entry.inputs(batch, length, mask), seed=1))


def test_the_bar_has_twenty_five_architectures() -> None:
    assert len(BAR) == 25
    assert all(len(entry.shapes) == 2 and entry.shapes[0] != entry.shapes[1] for entry in ZOO.values())


@pytest.mark.parametrize("name", STOCHASTIC)
def test_the_seed_matters_in_train_mode_only(name: str) -> None:
    entry = ZOO[name]
    model, inputs = entry.build(), entry.inputs(*entry.shapes[0], entry.masks[0])
    assert run(model, inputs, seed=3).loss != run(model, inputs, seed=4).loss
    assert run(model, inputs, seed=3, train=False).loss == run(model, inputs, seed=4, train=False).loss


def test_a_step_leaves_the_model_as_it_was() -> None:
    model, inputs = ZOO["plain-resnet"].build(), ZOO["plain-resnet"].inputs(2, 16)
    state = copy.deepcopy(model.state_dict())
    marker = torch.ones_like(model.head.weight)
    model.head.weight.grad = marker
    stream = torch.get_rng_state()
    run(model, inputs, train=False)
    assert model.head.weight.grad is marker
    assert model.training
    assert torch.equal(stream, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_the_branching_model_takes_both_branches() -> None:
    model, entry = ZOO["plain-branching"].build(), ZOO["plain-branching"]
    assert isinstance(model, BranchingNetwork)
    taken = set()
    for seed in range(8):
        grads = run(model, entry.inputs(2, 10, "absent", seed=seed)).grads
        taken.add(grads["calm.weight"] is not None)
    assert taken == {True, False}


@pytest.fixture
def step() -> Run:
    return run(ZOO["plain-resnet"].build(), ZOO["plain-resnet"].inputs(2, 16), seed=1)


def test_comparison_notices_one_bit_of_one_gradient(step: Run) -> None:
    other = copy.deepcopy(step)
    grad = other.grads["head.weight"]
    assert grad is not None
    grad.view(torch.int32)[0, 0] += 1
    with pytest.raises(AssertionError, match=r"grads head\.weight: 1 of 96 elements"):
        assert_equal(step, other)


@pytest.mark.parametrize("change", ["missing gradient", "buffer", "rng", "loss"])
def test_comparison_notices(step: Run, change: str) -> None:
    other = copy.deepcopy(step)
    if change == "missing gradient":
        other.grads["head.weight"] = None
    if change == "buffer":
        other.buffers["stem.1.num_batches_tracked"] += 1
    if change == "rng":
        other.rng_state[-100] += 1
    if change == "loss":
        other.loss.add_(1e-3)
    with pytest.raises(AssertionError):
        assert_equal(step, other)


def test_comparison_takes_nan_for_nan(step: Run) -> None:
    step.loss.fill_(float("nan"))
    assert_equal(step, copy.deepcopy(step))
