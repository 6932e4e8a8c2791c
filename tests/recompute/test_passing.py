"""What passes between blocks: dropped after the forward, made again when asked for, checked before it is."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rewrite.errors import RecomputeError
from rewrite.plan.curve import EACH, ONCE
from tests.recompute.models import Block, Stack, Subset, assert_same, forward, hidden, left, loss_of, mlp, pair

DEPTH = 4


def plain(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Two products, of which a recompute runs the first again; what is given is needed for its weight's gradient."""
    return hidden + block.down(torch.tanh(block.up(hidden)))


def grouped(passing: str, body: Any = plain) -> tuple[nn.Module, nn.Module]:
    return pair(Stack(lambda: Block(body), DEPTH), Subset(passing=passing), hidden())


class Products(TorchDispatchMode):
    """Counts matrix products, and notes what the blocks make."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.sums: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.counted[func.overloadpacket.__name__] += 1
        if func.overloadpacket.__name__ == "add":
            self.sums.append(weakref.ref(result.untyped_storage()))
        return result


@pytest.mark.parametrize("passing", ["", ONCE, EACH])
def test_nothing_that_passes_within_a_group_is_held(passing: str) -> None:
    _, small = grouped(passing)
    with Products() as seen:
        loss = forward(small, hidden())
    gc.collect()

    held = [reference() is not None for reference in seen.sums[:-1]]  # what the last gives is no block's
    assert held == [not passing] * (DEPTH - 1)
    loss.backward()


@pytest.mark.parametrize(
    ("passing", "runs"),
    [
        pytest.param("", 0, id="held"),
        pytest.param(ONCE, DEPTH - 1, id="once"),
        # Each block but the first asks twice, for its recompute and for its weight's gradient; to make what passes to
        # block n again, n blocks run.
        pytest.param(EACH, 2 * sum(range(DEPTH)), id="each"),
    ],
)
def test_blocks_run_again_as_often_as_is_said(passing: str, runs: int) -> None:
    _, small = grouped(passing)
    loss = forward(small, hidden())
    with Products() as seen:
        loss.backward()

    of_backward, within = 4 * DEPTH, DEPTH
    assert sum(seen.counted[name] for name in ("mm", "addmm")) == of_backward + within + 2 * runs


@pytest.mark.parametrize("passing", [ONCE, EACH])
def test_random_numbers_of_blocks_are_those_of_the_forward(passing: str) -> None:
    whole, small = grouped(passing, mlp)
    found = []
    for model in (whole, small):
        given = hidden()
        loss = forward(model, given)
        torch.rand(3)  # the generator has moved on
        loss.backward()
        found.append(left(model, given.grad))
    assert_same(*found)


@pytest.mark.parametrize("passing", [ONCE, EACH])
def test_a_weight_changed_between_forward_and_backward_is_told(passing: str) -> None:
    _, small = grouped(passing)
    loss = forward(small, hidden())
    with torch.no_grad():
        small.blocks[1].up.weight.mul_(2)

    # What the last block needs of the first ones is made again by running them: their own backwards do not come to it.
    with pytest.raises(RecomputeError, match=r"parameter 'blocks\.1\.up\.weight' was changed in place"):
        torch.autograd.grad(loss, list(small.blocks[DEPTH - 1].parameters()))


def test_a_given_value_changed_between_forward_and_backward_is_told() -> None:
    _, small = grouped(ONCE)
    given = hidden() * 1
    loss = loss_of(small(given))
    with torch.no_grad():
        given.add_(1)

    with pytest.raises(RecomputeError, match="a value it starts from was changed in place"):
        torch.autograd.grad(loss, list(small.blocks[DEPTH - 1].parameters()))


@pytest.mark.parametrize("passing", [ONCE, EACH])
def test_a_backward_through_the_last_blocks_alone_and_then_all(passing: str) -> None:
    found = []
    for model in grouped(passing):
        given = hidden()
        loss = forward(model, given)
        last = torch.autograd.grad(loss, list(model.blocks[2].parameters()), retain_graph=True)
        first = torch.autograd.grad(loss, list(model.blocks[0].parameters()), retain_graph=True)
        loss.backward()
        found.append([*last, *first, left(model, given.grad)])
    assert_same(*found)


@pytest.mark.parametrize("passing", [ONCE, EACH])
def test_what_was_made_again_goes_with_the_graph(passing: str) -> None:
    _, small = grouped(passing)
    loss = forward(small, hidden())
    with Products() as seen:
        loss.backward()
    del loss
    gc.collect()

    assert seen.sums
    assert not any(reference() for reference in seen.sums)
