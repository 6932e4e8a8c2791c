"""A training loop may do with the rewritten module whatever it may do with the original."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint
from tests.cases.test_distributed import Twice
from tests.promises.pairs import Pair, blocks, names, pair, policies
from tests.zoo.compare import assert_equal, loss_of, run

models = names("bert", "plain-branching", sweep=("llama", "t5"))
settled = names("bert", sweep=("plain-branching", "llama", "t5"))
"""Where each mode has a model with branches captured many times."""


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(both: Pair) -> None:
    ours, theirs = gradients(both.plain), gradients(both.small)
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        other = theirs[name]
        assert (grad is None) == (other is None), name
        assert grad is None or torch.equal(grad, other), name
    assert any(grad is not None for grad in ours.values())


def both_do(both: Pair, action: Callable[[nn.Module], object]) -> tuple[object, object]:
    """Do the same with each model, from the same seed."""
    results = []
    for model in (both.plain, both.small):
        torch.manual_seed(3)
        results.append(action(model))
    return results[0], results[1]


@pytest.mark.thinned(3)
@models
@policies
def test_five_optimizer_steps_are_the_same(name: str, policy: str) -> None:
    both = pair(name, policy)

    def train(model: nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = loss_of(model(**both.inputs))
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    expected, found = both_do(both, train)
    assert expected == found
    assert_same_gradients(both)
    assert_equal(run(both.plain, both.inputs, 9, train=False), run(both.small, both.inputs, 9, train=False))


@models
def test_gradients_accumulate_over_batches(name: str) -> None:
    both = pair(name)

    def accumulate(model: nn.Module) -> None:
        for _ in range(3):
            loss_of(model(**both.inputs)).backward()

    both_do(both, accumulate)
    assert_same_gradients(both)


@pytest.mark.thinned(4)
@models
@policies
def test_two_forwards_before_two_backwards(name: str, policy: str) -> None:
    both = pair(name, policy)

    def interleave(model: nn.Module) -> None:
        first, second = loss_of(model(**both.inputs)), loss_of(model(**both.inputs))
        first.backward()
        second.backward()

    both_do(both, interleave)
    assert_same_gradients(both)


@pytest.mark.thinned(4)
@models
@policies
def test_a_graph_may_be_kept(name: str, policy: str) -> None:
    both = pair(name, policy)

    def twice(model: nn.Module) -> None:
        loss = loss_of(model(**both.inputs))
        loss.backward(retain_graph=True)
        loss.backward()

    both_do(both, twice)
    assert_same_gradients(both)


@policies
def test_a_graph_that_was_not_kept_raises(policy: str) -> None:
    both = pair("bert", policy)
    loss = loss_of(both.small(**both.inputs))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.thinned(4)
@models
@policies
def test_gradients_may_be_asked_for(name: str, policy: str) -> None:
    both = pair(name, policy)

    def ask(model: nn.Module) -> tuple[torch.Tensor | None, ...]:
        return torch.autograd.grad(loss_of(model(**both.inputs)), list(model.parameters()), allow_unused=True)

    expected, found = both_do(both, ask)
    for ours, theirs in zip(expected, found, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    assert all(grad is None for grad in gradients(both.small).values())


@policies
def test_a_gradient_of_a_gradient(policy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)))
    hidden = torch.randn(4, 8, requires_grad=True)
    small = rewrite.optimize(copy.deepcopy(model), passes=[Checkpoint(policy=policy)], example_inputs=hidden)
    both = Pair(model, small, {})

    def penalty(model: nn.Module) -> None:
        (grad,) = torch.autograd.grad(model(hidden).pow(2).sum(), hidden, create_graph=True)
        grad.pow(2).sum().backward(inputs=list(model.parameters()))

    both_do(both, penalty)
    assert_same_gradients(both)


@pytest.mark.thinned(2)
@policies
def test_a_block_used_twice(policy: str) -> None:
    torch.manual_seed(0)
    model, hidden = Twice(), torch.randn(4, 16)
    small = rewrite.optimize(model, passes=[Checkpoint(policy=policy)], example_inputs=hidden)
    assert_equal(run(model, {"hidden": hidden}), run(small, {"hidden": hidden}))


@pytest.mark.thinned(2)
@models
def test_freezing_and_thawing_later_is_noticed(name: str) -> None:
    both = pair(name)
    for frozen in ((0,), (0, 1), (), (1,)):
        for model in (both.plain, both.small):
            for index, block in enumerate(blocks(model)):
                block.requires_grad_(index not in frozen)
        expected, found = run(both.plain, both.inputs), run(both.small, both.inputs)
        assert_equal(expected, found)
        assert sum(grad is None for grad in found.grads.values()) >= len(frozen)
    for model in (both.plain, both.small):
        model.requires_grad_(False)
    assert not loss_of(both.small(**both.inputs)).requires_grad
    both.plain.requires_grad_(True)
    both.small.requires_grad_(True)
    assert_equal(run(both.plain, both.inputs), run(both.small, both.inputs))


@settled
def test_no_grad_and_inference_mode(name: str) -> None:
    both = pair(name)
    for mode in (torch.no_grad, torch.inference_mode):

        def call(model: nn.Module, mode: Callable[[], object] = mode) -> float:
            with mode():
                loss = loss_of(model(**both.inputs))
            assert not loss.requires_grad
            return float(loss)

        expected, found = both_do(both, call)
        assert expected == found
    assert_equal(run(both.plain, both.inputs), run(both.small, both.inputs))


@settled
@policies
def test_an_outer_autocast(name: str, policy: str) -> None:
    both = pair(name, policy)

    def step(model: nn.Module) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model(**both.inputs))
        loss.backward()
        return float(loss.detach())

    expected, found = both_do(both, step)
    assert expected == found
    assert_same_gradients(both)
    assert_equal(run(both.plain, both.inputs), run(both.small, both.inputs))


@policies
def test_a_weight_changed_before_the_backward_raises(policy: str) -> None:
    both = pair("bert", policy)
    for model in (both.plain, both.small):
        loss = loss_of(model(**both.inputs))
        with torch.no_grad():
            next(parameter for parameter in blocks(model)[1].parameters() if parameter.dim() == 2).add_(1)
        with pytest.raises(RuntimeError, match=r"modified|changed"):
            loss.backward()
        model.zero_grad()
    assert_equal(run(both.plain, both.inputs), run(both.small, both.inputs))


@policies
def test_an_error_in_the_forward_leaves_nothing_behind(policy: str) -> None:
    both = pair("bert", policy)

    def fail(*_: object) -> None:
        raise KeyError("stop here")

    handle = blocks(both.small)[1].register_forward_hook(fail)
    with pytest.raises(KeyError, match="stop here"):
        both.small(**both.inputs)
    handle.remove()
    assert torch.is_grad_enabled()
    assert_equal(run(both.plain, both.inputs), run(both.small, both.inputs))


@policies
def test_an_error_in_the_backward_leaves_nothing_behind(policy: str) -> None:
    both = pair("bert", policy)

    def fail(*_: object) -> None:
        raise KeyError("stop here")

    handle = blocks(both.small)[1].register_full_backward_hook(fail)
    with pytest.raises(KeyError, match="stop here"):
        loss_of(both.small(**both.inputs)).backward()
    handle.remove()
    both.small.zero_grad()
    assert_equal(run(both.plain, both.inputs), run(both.small, both.inputs))


@policies
def test_random_streams_go_on_where_they_should(policy: str) -> None:
    both = pair("bert", policy)

    def draw(model: nn.Module) -> float:
        loss = loss_of(model(**both.inputs))
        torch.rand(3)
        loss.backward()
        return float(torch.rand(()))

    expected, found = both_do(both, draw)
    assert expected == found
    assert_same_gradients(both)


def test_functional_call_uses_the_parameters_given() -> None:
    both = pair("plain-branching")
    given = {name: parameter.detach() * 0.5 for name, parameter in both.plain.named_parameters()}
    expected, found = both_do(both, lambda model: torch.func.functional_call(model, given, (), both.inputs))
    assert torch.equal(expected, found)
