"""What was changed between forward and backward: an error, as without recomputing, and never other gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from tests.recompute.models import (
    EVERYTHING,
    NOTHING,
    VALUES,
    WIDTH,
    Block,
    Stack,
    Subset,
    assert_same,
    forward,
    hidden,
    mlp,
    pair,
    stacks,
    step,
    tensors,
)  # fmt: skip

subsets = pytest.mark.parametrize("subset", [NOTHING, VALUES, EVERYTHING], ids=str)

BODIES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "mlp": mlp,
    "one layer": lambda block, value: block.up(value),
    "one product": lambda block, value: value @ block.up.weight,
    "a square": lambda block, value: block.up(value) * value,
}


@subsets
@pytest.mark.parametrize("body", BODIES)
def test_a_weight_changed_in_place(body: str, subset: Subset) -> None:
    for model in stacks(subset, BODIES[body]):
        given = hidden()
        loss = forward(model, given)
        with torch.no_grad():
            model.blocks[1].up.weight.add_(0.1)
        with pytest.raises(RuntimeError, match=r"in[ -]?place"):
            torch.autograd.grad(loss, given)


@subsets
@pytest.mark.parametrize("body", BODIES)
def test_an_input_changed_in_place(body: str, subset: Subset) -> None:
    for model in stacks(subset, BODIES[body]):
        given = hidden() * 1
        loss = forward(model, given)
        with torch.no_grad():
            given.add_(0.1)
        with pytest.raises(RuntimeError, match=r"in[ -]?place"):
            loss.backward()


@subsets
def test_a_weight_changed_between_two_parts_of_a_backward(subset: Subset) -> None:
    for model in stacks(subset, BODIES["one product"]):
        given = hidden()
        loss = forward(model, given)
        torch.autograd.grad(loss, model.blocks[1].up.weight, retain_graph=True)
        with torch.no_grad():
            model.blocks[1].up.weight.add_(0.1)
        with pytest.raises(RuntimeError, match=r"in[ -]?place"):
            torch.autograd.grad(loss, given)


def test_a_weight_replaced() -> None:
    """Autograd goes on with the old one; a recompute would start from the new, and says so."""
    plain, small = stacks(NOTHING)
    for model in (plain, small):
        loss = forward(model, hidden())
        model.blocks[0].up.weight = nn.Parameter(torch.randn(8, 8))
        if model is plain:
            loss.backward()
            continue
        with pytest.raises(RuntimeError, match=r"'up\.weight' was replaced"):
            loss.backward()


@subsets
def test_a_result_that_is_changed_in_place_by_the_caller(subset: Subset) -> None:
    """An error where the backward needs it as it was; the right gradients where it can be computed again."""

    def body(block: Any, value: torch.Tensor) -> torch.Tensor:
        return block.up(value).tanh()

    plain, small = stacks(subset, body)
    given, other = hidden(), hidden()
    (plain(given) * 2).sum().backward()
    try:
        small(other).mul_(2).sum().backward()
    except rewrite.RewriteError:
        return
    assert_same(tensors([p.grad for p in plain.parameters()]), tensors([p.grad for p in small.parameters()]))
    assert_same(tensors(given.grad), tensors(other.grad))


class Scaled(nn.Module):
    """A block that multiplies by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.up(value) * self.scale) * value


@subsets
def test_a_buffer_changed_in_place(subset: Subset) -> None:
    for model in pair(Stack(Scaled), subset, hidden()):
        loss = forward(model, hidden())
        model.blocks[0].scale.mul_(2)
        with pytest.raises(RuntimeError, match=r"in[ -]?place"):
            loss.backward()


def test_a_scripted_layer_is_recomputed_and_its_weights_are_looked_at() -> None:
    def body(block: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + block.down(block.layer(block.up(hidden)).tanh())

    layer = lambda: torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))  # noqa: E731
    plain = Stack(lambda: Block(body, layer=layer))
    small = rewrite.optimize(plain, passes=[NOTHING], example_inputs=(hidden(),))
    assert len(rewrite.report(small).changes) == 2
    for train in (True, True, False):
        assert_same(step(plain, hidden(), train=train), step(small, hidden(), train=train))
    loss = forward(small, hidden())
    with torch.no_grad():
        plain.blocks[1].layer[0].weight.mul_(2)  # type: ignore[union-attr, index, operator]
    with pytest.raises(rewrite.RecomputeError, match="was changed in place"):
        loss.backward()
