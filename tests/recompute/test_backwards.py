"""Backwards in every order and number: once, twice, in part, broken off, differentiated again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.recompute.models import (
    EVERYTHING,
    NOTHING,
    RELEASED,
    SOME,
    STATES,
    SUBSETS,
    Block,
    Subset,
    assert_same,
    forward,
    hidden,
    left,
    loss_of,
    mlp,
    pair,
    stacks,
    tensors,
)  # fmt: skip

subsets = pytest.mark.parametrize("subset", SUBSETS, ids=str)


def both(subset: Subset, run: Callable[[nn.Module], Any], **options: Any) -> None:
    """What `run` gives for a stack and for the rewritten one is the same."""
    plain, small = stacks(subset, **options)
    assert_same(run(plain), run(small))


def test_twice_and_three_times() -> None:
    def run(model: nn.Module) -> Any:
        given = hidden()
        loss = forward(model, given)
        found = []
        for last in (False, False, True):
            loss.backward(retain_graph=not last)
            found.append(left(model, given.grad))
        return found

    for subset in SUBSETS:
        both(subset, run)


@subsets
def test_a_second_time_without_retaining_is_an_error(subset: Subset) -> None:
    for model in stacks(subset):
        loss = forward(model, hidden())
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_a_graph_that_is_used_in_part() -> None:
    """The gradient of one thing, and nothing else of that graph."""

    def run(model: nn.Module) -> Any:
        found = []
        for wanted in ("blocks.0.up.bias", "blocks.1.down.weight"):
            given = hidden()
            loss = forward(model, given)
            found += torch.autograd.grad(loss, dict(model.named_parameters())[wanted])
            loss = forward(model, given)
            found += torch.autograd.grad(loss, given)
        return [tensors(found), left(model)]

    for subset in SUBSETS:
        both(subset, run)


def two_results(block: Any, value: torch.Tensor) -> Any:
    inner = torch.sin(block.up(value))
    return value + inner, torch.exp(block.down(inner)) * inner


class TwoResults(nn.Module):
    """Each block gives a value for the next and one for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(two_results) for _ in range(2))

    def forward(self, given: torch.Tensor) -> Any:
        beside = []
        for block in self.blocks:
            given, other = block(given)
            beside.append(other)
        return given, beside


@pytest.mark.thinned(2)
@pytest.mark.parametrize("subset", [NOTHING, EVERYTHING], ids=str)
def test_results_with_backwards_of_their_own(subset: Subset) -> None:
    plain, small = pair(TwoResults(), subset, hidden())
    found = []
    for model in (plain, small):
        given = hidden()
        last, (first, second) = model(given)
        second.sum().backward(retain_graph=True)
        (last.sum() + first.sum()).backward()
        found.append(left(model, given.grad))
    assert_same(*found)


def test_a_module_called_twice_before_one_backward() -> None:
    def run(model: nn.Module) -> Any:
        one, other = hidden(0), hidden(1)
        torch.manual_seed(5)
        (loss_of(model(one)) + loss_of(model(other)) + loss_of(model(model(one)))).backward()
        return left(model, one.grad, other.grad)

    for subset in (NOTHING, SOME):
        both(subset, run)


def test_a_fresh_step_after_a_backward_that_was_broken_off() -> None:
    def broken(_: torch.Tensor) -> None:
        raise ValueError("broken off")

    def run(model: nn.Module) -> Any:
        handle = model.blocks[0].down.weight.register_hook(broken)
        with pytest.raises(ValueError, match="broken off"):
            forward(model, hidden()).backward()
        handle.remove()
        given = hidden()
        forward(model, given).backward()
        return left(model, given.grad)

    for subset in SUBSETS:
        both(subset, run)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("subset", [NOTHING, STATES, EVERYTHING], ids=str)
def test_gradients_of_gradients(subset: Subset) -> None:
    def run(model: nn.Module) -> Any:
        given = hidden()
        loss = forward(model, given)
        weights = [each for each in model.parameters() if each.ndim == 2]
        first = torch.autograd.grad(loss, [given, *weights], create_graph=True)
        sum(each.pow(2).sum() for each in first).backward()
        return [tensors(first), left(model, given.grad)]

    both(subset, run)


def test_a_batch_of_gradients() -> None:
    def run(model: nn.Module) -> Any:
        given = hidden()
        result = model(given).sum((1, 2))
        return tensors(torch.autograd.grad(result, given, torch.eye(len(given)), is_grads_batched=True))

    def body(block: Any, value: torch.Tensor) -> torch.Tensor:
        return value + block.down(torch.tanh(block.up(value)))

    both(SOME, run, body=body)


def test_optimizers_that_step_during_the_backward() -> None:
    def run(model: nn.Module) -> Any:
        def stepped(weight: nn.Parameter) -> None:
            with torch.no_grad():
                weight -= 0.1 * weight.grad
            weight.grad = None

        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(stepped)
        for _ in range(3):
            given = hidden()
            forward(model, given).backward()
        return [tensors(list(model.parameters())), left(model, given.grad)]

    for subset in SUBSETS:
        both(subset, run)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_around(reentrant: bool) -> None:
    def run(model: nn.Module) -> Any:
        given = hidden()
        torch.manual_seed(5)
        loss = loss_of(checkpoint(model, given, use_reentrant=reentrant))
        if not reentrant:
            loss.backward(retain_graph=True)
        loss.backward()
        return left(model, given.grad)

    for subset in (NOTHING, SOME):
        both(subset, run)


def test_saved_tensors_kept_elsewhere_by_the_user() -> None:
    def run(model: nn.Module) -> Any:
        given = hidden()
        with torch.autograd.graph.save_on_cpu():
            loss = forward(model, given)
        with torch.autograd.graph.save_on_cpu():
            loss.backward()
        return left(model, given.grad)

    both(SOME, run)


def shared(block: Any, value: torch.Tensor) -> torch.Tensor:
    return value + block.up(torch.sin(block.up(value))) * nn.functional.linear(value, block.down.weight)


@subsets
def test_a_weight_in_several_places(subset: Subset) -> None:
    def run(model: nn.Module) -> Any:
        for block in model.blocks:
            block.down.weight = block.up.weight
        given = hidden()
        forward(model, given).backward()
        return left(model, given.grad)

    both(subset, run, body=shared)


@pytest.mark.thinned(6)
@subsets
@pytest.mark.parametrize("part", ["blocks.0", "weight", "bias", "up"])
def test_weights_frozen_after_the_rewrite_and_thawed(part: str, subset: Subset) -> None:
    def run(model: nn.Module) -> Any:
        found = []
        for frozen in (True, False):
            for name, weight in model.named_parameters():
                weight.requires_grad_(not (frozen and part in name))
            given = hidden().detach()
            forward(model, given).backward()
            found.append(left(model))
        return found

    both(subset, run, body=mlp)


def test_backwards_of_several_threads_through_one_graph() -> None:
    for subset in (NOTHING, SOME, RELEASED):
        _, small = stacks(subset)
        loss, weights = forward(small, hidden()), list(small.parameters())
        expected = torch.autograd.grad(loss, weights, retain_graph=True)
        found: list[Any] = []

        def run(loss: torch.Tensor = loss, weights: Any = weights, found: list[Any] = found) -> None:
            found.extend(torch.autograd.grad(loss, weights, retain_graph=True) for _ in range(20))

        threads = [threading.Thread(target=run) for _ in range(4)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
        assert len(found) == 80
        for each in found:
            torch.testing.assert_close(each, expected)
