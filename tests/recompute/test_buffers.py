"""Buffers that a forward writes are written once, and recomputes do not see what came later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.recompute.models import NOTHING, SOME, Stack, Subset, assert_same, hidden, left, loss_of, pair, stacks, step

subsets = pytest.mark.parametrize("subset", [NOTHING, SOME], ids=str)


class Counting(nn.Module):
    """A block that computes with a buffer, and changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(1.1)
        return torch.sin(self.up(value) + self.scale) * value


class Spectral(nn.Module):
    """A block whose weight is divided by a norm that each forward brings nearer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.utils.spectral_norm(nn.Linear(8, 8))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + torch.sin(self.up(value))


@subsets
@pytest.mark.parametrize("block", [Counting, Spectral])
def test_two_forwards_before_a_backward(block: Any, subset: Subset) -> None:
    found = []
    plain, small = pair(Stack(block), subset, hidden())
    small.load_state_dict(plain.state_dict())
    for model in (plain, small):
        one, other = hidden(0), hidden(1)
        (loss_of(model(one)) + loss_of(model(other))).backward()
        found.append(left(model, one.grad, other.grad))
    assert_same(*found)


@subsets
@pytest.mark.parametrize("momentum", [0.1, 0.9])
def test_batch_statistics(momentum: float, subset: Subset) -> None:
    def body(block: Any, value: torch.Tensor) -> torch.Tensor:
        return value + block.down(torch.relu(block.norm(block.up(value))))

    plain, small = stacks(subset, body, norm=lambda: nn.BatchNorm1d(6, momentum=momentum))
    for train in (True, True, False, True):
        assert_same(step(plain, hidden(), train=train), step(small, hidden(), train=train))
