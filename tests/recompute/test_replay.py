"""A recompute runs in the surroundings of its forward, whatever those of the backward are."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rewrite.recompute.replay import random_state, replayed
from tests.recompute.models import NOTHING, SOME, Subset, assert_same, forward, hidden, left, stacks

subsets = pytest.mark.parametrize("subset", [NOTHING, SOME], ids=str)


def half() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def mathematics() -> Any:
    return sdpa_kernel(SDPBackend.MATH)


def plainly() -> Any:
    return contextlib.nullcontext()


def attending(block: Any, value: torch.Tensor) -> torch.Tensor:
    inner = block.up(value)[:, None]
    drop = 0.3 if block.training else 0.0
    inner = nn.functional.scaled_dot_product_attention(inner, value[:, None], inner, dropout_p=drop)
    return value + block.down(inner[:, 0])


def mixing(block: Any, value: torch.Tensor) -> torch.Tensor:
    return value + block.up(torch.sin(block.up(value)) @ block.down(value).transpose(1, 2) @ value)


@pytest.mark.thinned(2)
@subsets
@pytest.mark.parametrize(
    ("then", "later"), [(half, plainly), (half, half), (plainly, half), (mathematics, plainly), (plainly, mathematics)]
)
def test_surroundings_of_forward_and_backward(then: Any, later: Any, subset: Subset) -> None:
    for body in (mixing, attending):
        found = []
        for model in stacks(subset, body):
            for _ in range(2):
                given = hidden()
                with then():
                    loss = forward(model, given)
                with later():
                    loss.backward()
            found.append(left(model, loss, given.grad))
        assert_same(*found)


def test_random_numbers_are_drawn_again_and_the_generator_goes_on() -> None:
    torch.manual_seed(0)
    state = random_state([])
    drawn = torch.rand(3)
    before = torch.get_rng_state()
    assert torch.equal(replayed(state, lambda: torch.rand(3)), drawn)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ZeroDivisionError):
        replayed(state, lambda: 1 / 0)
    assert torch.equal(torch.get_rng_state(), before)
