"""A dropout with a mask of one byte an element is torch's own, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from rewrite.recompute import dropout
from tests.recompute.models import NOTHING, SOME, STATES, Subset, assert_same, hidden, stacks, step


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("turned", [False, True])
def test_mask_and_values_are_torchs(dtype: torch.dtype, probability: float, turned: bool) -> None:
    value = torch.randn(5, 7).to(dtype)
    value = value.t() if turned else value
    torch.manual_seed(0)
    expected = functional.dropout(value, probability, True)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    factors = dropout.draw(value, probability)
    assert torch.equal(value * factors, expected)
    assert torch.equal(torch.get_rng_state(), after)
    mask = dropout.mask_of(factors, probability)
    assert torch.equal(mask.expand(), factors)
    assert mask.expand().stride() == factors.stride()
    assert mask.passed.untyped_storage().nbytes() == value.numel()


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("value", "probability", "training"),
    [(torch.ones(3), 0.5, False), (torch.ones(3), 0.0, True), (torch.ones(3), 1.0, True), (torch.ones(0), 0.5, True)],
)
def test_no_mask_where_torch_draws_none(value: torch.Tensor, probability: float, training: bool) -> None:
    assert not dropout.draws_a_mask(value, probability, training)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    functional.dropout(value, probability, training)
    assert torch.equal(torch.get_rng_state(), before)


LAYERS = {
    "dropout": nn.Dropout, "of features": nn.Dropout1d, "alpha": nn.AlphaDropout,
    "in place": lambda p: nn.Dropout(p, inplace=True),
}  # fmt: skip


@pytest.mark.thinned(3)
@pytest.mark.parametrize("subset", [NOTHING, STATES], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("probability", [0.0, 0.5, 1.0])
def test_layers_of_every_probability(layer: str, probability: float, subset: Subset) -> None:
    def body(block: Any, value: torch.Tensor) -> torch.Tensor:
        return value + block.down(block.drop(block.up(value).sin() * 1.5))

    plain, small = stacks(subset, body, drop=lambda: LAYERS[layer](probability))
    for train in (True, False):
        assert_same(step(plain, hidden(), train=train), step(small, hidden(), train=train))


def test_a_probability_changed_after_the_rewrite() -> None:
    def body(block: Any, value: torch.Tensor) -> torch.Tensor:
        return value + block.down(block.drop(block.up(value).sin()))

    plain, small = stacks(STATES, body, drop=lambda: nn.Dropout(0.0))
    for probability in (0.0, 0.4, 1.0, 0.2):
        for model in (plain, small):
            for block in model.blocks:
                block.drop.p = probability
        assert_same(step(plain, hidden()), step(small, hidden()))


def test_noise_that_rrelu_saves() -> None:
    def body(block: Any, value: torch.Tensor) -> torch.Tensor:
        return value + block.down(functional.rrelu(block.up(value), training=block.training))

    for subset in (NOTHING, SOME):
        plain, small = stacks(subset, body)
        for train in (True, False):
            assert_same(step(plain, hidden(), train=train), step(small, hidden(), train=train))


LAID_OUT = {
    "channels last": lambda: torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last),
    "a single image, channels last": lambda: torch.randn(1, 8, 4, 4).contiguous(memory_format=torch.channels_last),
    "a single row, turned": lambda: torch.randn(1, 8, 16).transpose(0, 1),
    "turned": lambda: torch.randn(4, 8, 16).transpose(1, 2),
    "a part": lambda: torch.randn(4, 16, 8)[:, :8],
    "expanded": lambda: torch.randn(1, 8, 1).expand(4, 8, 6),
    "every second": lambda: torch.randn(4, 20)[:, ::2],
}


@pytest.mark.parametrize("layout", LAID_OUT)
def test_a_dropout_from_its_mask_lies_as_torchs(layout: str) -> None:
    value = LAID_OUT[layout]()
    torch.manual_seed(0)
    expected = functional.dropout(value, 0.1, True)
    torch.manual_seed(0)
    found = dropout.mask_of(dropout.draw(value, 0.1), 0.1).applied(value)
    assert found.stride() == expected.stride()
    assert torch.equal(found, expected)
