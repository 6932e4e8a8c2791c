"""The backward starts where a user's would, and the estimate says where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rewrite.errors import InputError
from rewrite.memory import estimate_step


class Returns(nn.Module):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.linear(x))


@pytest.mark.parametrize(
    ("make", "meaning"),
    [
        (lambda y: {"loss": y.sum(), "logits": y}, "the output's loss"),
        (lambda y: y.mean(), "the output, a scalar"),
        (lambda y: (y.mean(), y), "the first element"),
        (lambda y: (y, y + 1), "the sum of every floating tensor"),
        (lambda y: {"logits": y, "ids": y.argmax(-1)}, "the sum of every floating tensor"),
    ],
)
def test_loss_is_found_and_named(make: Any, meaning: str) -> None:
    estimate = estimate_step(Returns(make), torch.randn(2, 4))

    assert estimate.loss.startswith(meaning)
    assert estimate.phases["backward"] > 0


def test_nothing_to_train_is_an_error_with_a_next_step() -> None:
    module = Returns(lambda y: y)
    module.requires_grad_(False)
    with pytest.raises(InputError, match=r"(?s)requires a gradient.*Next: .*train=False"):
        estimate_step(module, torch.randn(2, 4))


def test_forward_alone() -> None:
    estimate = estimate_step(Returns(lambda y: y), torch.randn(2, 4), train=False)

    assert estimate.saved_bytes == 0
    assert list(estimate.phases) == ["forward"]
    assert estimate.flops.backward == 0


def test_the_loss_itself_is_not_saved() -> None:
    estimate = estimate_step(Returns(lambda y: y.sum()), torch.randn(2, 4))

    assert estimate.saved_bytes == 0
    assert estimate.saved == ()
