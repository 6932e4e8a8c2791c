"""What is set otherwise between forward and backward: the recompute runs as the forward ran, as autograd would."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint
from rewrite.errors import RecomputeError
from rewrite.recompute.settings import Modes, as_set
from tests.recompute.models import LENGTH, NOTHING, VALUES, WIDTH, Block, Stack, Subset, forward, hidden, pair, stacks

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(LENGTH),
    "dropout": lambda: nn.Dropout(0.3),
    "dropout of features": lambda: nn.Dropout1d(0.3),
    "alpha dropout": lambda: nn.AlphaDropout(0.3),
    "random leaky": lambda: nn.RReLU(),
}
RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "gru": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    "prelu": lambda: nn.PReLU(),
}
policies = pytest.mark.parametrize("subset", [NOTHING, VALUES, Checkpoint(), Checkpoint("sqrt")], ids=str)


def layered(block: Any, value: torch.Tensor) -> torch.Tensor:
    return value + block.down(torch.tanh(block.layer(block.up(value))))


def recurrent(block: Any, value: torch.Tensor) -> torch.Tensor:
    inner = torch.sin(block.up(value))
    inner = block.layer(*[inner] * 3) if isinstance(block.layer, nn.MultiheadAttention) else block.layer(inner)
    return value + block.down(torch.tanh(inner[0] if isinstance(inner, tuple) else inner))


def gradients(model: nn.Module, between: Callable[[nn.Module], Any]) -> dict[str, torch.Tensor]:
    given = hidden()
    loss = forward(model, given)
    between(model)
    loss.backward()
    assert given.grad is not None
    named = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"given": given.grad, **named, **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def assert_equal(plain: nn.Module, small: nn.Module, between: Callable[[nn.Module], Any]) -> None:
    expected, found = gradients(plain, between), gradients(small, between)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@policies
@pytest.mark.parametrize("kind", LAYERS)
def test_evaluation_before_the_backward(kind: str, subset: rewrite.Pass) -> None:
    plain, small = stacks(subset, layered, layer=LAYERS[kind])  # type: ignore[arg-type]
    assert_equal(plain, small, lambda model: model.eval())
    assert not any(module.training for module in small.modules())
    assert_equal(plain, small, lambda model: model.eval())  # and the next step trains again


@pytest.mark.parametrize("subset", [NOTHING, VALUES], ids=str)
def test_another_option_of_a_layer(subset: Subset) -> None:
    def widen(model: Any) -> None:
        for block in model.blocks:
            block.layer.eps = 0.5

    plain, small = stacks(subset, layered, layer=LAYERS["batch norm"])
    assert_equal(plain, small, widen)
    assert [block.layer.eps for block in small.blocks] == [0.5, 0.5]  # type: ignore[union-attr]


def test_a_layer_whose_option_was_deleted_is_left_without_it() -> None:
    def bare(model: Any) -> None:
        for block in model.blocks:
            del block.layer.eps

    plain, small = stacks(NOTHING, layered, layer=LAYERS["batch norm"])
    assert_equal(plain, small, bare)
    assert not any("eps" in vars(block.layer) for block in small.blocks)  # type: ignore[union-attr]


def test_a_scripted_layer_has_no_mode_to_bring_back() -> None:
    scripted = torch.jit.script(nn.Linear(WIDTH, WIDTH))
    before = dict(vars(scripted))
    assert Modes([scripted]).changed() == []
    scripted.eval()
    with as_set(Modes([scripted]).changed()):
        pass
    assert vars(scripted).keys() == before.keys()


@policies
@pytest.mark.parametrize("part", ["blocks", "weight", "blocks.1.layer"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_weights_frozen_before_the_backward(kind: str, part: str, subset: rewrite.Pass) -> None:
    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(part not in name)

    plain = Stack(lambda: Block(recurrent, layer=RECURRENT[kind]))
    plain, small = pair(plain, subset, hidden())  # type: ignore[arg-type]
    assert_equal(plain, small, freeze)
    assert [parameter.requires_grad for parameter in small.parameters()] == [
        parameter.requires_grad for parameter in plain.parameters()
    ]


def half_used(block: Any, value: torch.Tensor) -> torch.Tensor:
    inner = block.up(value)
    return value + block.down(torch.tanh(inner) * torch.sigmoid(inner).detach())  # of a token that is never cashed


def test_a_weight_changed_between_two_backwards_that_both_read_it() -> None:
    plain = Stack(lambda: Block(half_used))
    for model in pair(copy.deepcopy(plain), Checkpoint(), hidden()):  # type: ignore[arg-type]
        first, second = model.blocks[1].down.bias, model.blocks[1].up.weight  # type: ignore[union-attr]
        loss = forward(model, hidden())
        torch.autograd.grad(loss, [first, model.blocks[1].down.weight], retain_graph=True)  # type: ignore[union-attr]
        with torch.no_grad():
            model.blocks[1].up.bias.add_(1.0)  # type: ignore[union-attr]
        if "forward" in vars(model):
            with pytest.raises(RecomputeError, match=r"parameter 'up.bias' was changed in place"):
                torch.autograd.grad(loss, [second])
        else:
            torch.autograd.grad(loss, [second])
