"""What may draw random numbers is known to: torch's own tag is the measure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from rewrite.capture.randomness import draws, draws_in_module

HOMES = (torch, torch.Tensor, functional, torch._C._nn, torch.special, torch.linalg)
INSIDE = ("_", "miopen_rnn")
"""Beginnings of the names of what public functions call inside: a model calls those."""


def drawing_operators() -> list[str]:
    """Names of the aten operators that torch tags as drawing from a generator, public and for use inside."""
    names = {
        schema.name.partition("::")[2] for schema in torch._C._jit_get_all_schemas() if schema.name[:6] == "aten::"
    }
    return sorted(filter(_tagged, names))


def _tagged(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def test_every_function_of_a_drawing_operator_draws() -> None:
    reached = [(home, name) for name in drawing_operators() for home in HOMES if callable(getattr(home, name, None))]
    assert len(reached) > 60
    dropped = {"dropout_p": 0.5}
    quiet = [name for home, name in reached if not draws(getattr(home, name), name, (), dropped)]
    assert [name for name in quiet if not name.startswith(INSIDE)] == []


def test_every_drawing_operator_itself_draws() -> None:
    names = drawing_operators()
    assert "bernoulli" in names
    assert [name for name in names if not draws(getattr(torch.ops.aten, name), name, (), {"dropout_p": 0.5})] == []


def test_functions_that_only_compute() -> None:
    functions = [
        torch.sin, torch.matmul, torch.cumsum, torch.where, torch.topk, torch.arange, torch.einsum, torch.Tensor.view,
        torch.Tensor.add_, torch.Tensor.norm, functional.normalize, functional.layer_norm,
        functional.softmax, functional.gelu, functional.linear, functional.embedding, functional.batch_norm,
        functional.interpolate, functional.max_pool2d, functional.cross_entropy, torch.ops.aten.mm.default,
    ]  # fmt: skip
    assert [f.__name__ for f in functions if draws(f, f.__name__, (), {})] == []


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [((), {}, False), ((), {"dropout_p": 0.0}, False), ((), {"dropout_p": 0.1}, True), ((1, 2, 3, None, 0.1), {}, True),
     ((1, 2, 3, None, 0.0), {}, False), ((), {"dropout_p": torch.tensor(0.1)}, True)],
)  # fmt: skip
def test_attention_draws_if_it_drops(args: tuple[Any, ...], kwargs: dict[str, Any], expected: bool) -> None:
    function = functional.scaled_dot_product_attention
    assert draws(function, "scaled_dot_product_attention", args, kwargs) is expected


def test_what_comes_from_elsewhere_may_draw() -> None:
    def own(value: torch.Tensor) -> torch.Tensor:
        return value

    own.__module__ = "elsewhere"
    assert draws(own, "own", (), {})


class Own(nn.Module):
    """A layer that is not torch's."""


@pytest.mark.parametrize(
    ("layer", "expected"),
    [(nn.Linear(2, 2), False), (nn.LayerNorm(2), False), (nn.BatchNorm1d(2), False), (nn.Dropout(0.1), True),
     (nn.RReLU(), True), (nn.LSTM(2, 2), True), (nn.MultiheadAttention(2, 1), True), (nn.AlphaDropout(), True),
     (nn.Sequential(nn.Linear(2, 2), nn.Dropout2d()), True), (nn.Sequential(nn.Linear(2, 2), nn.GELU()), False),
     (Own(), True)],
)  # fmt: skip
def test_layers(layer: nn.Module, expected: bool) -> None:
    assert draws_in_module(layer) is expected
