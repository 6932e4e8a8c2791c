"""Work is counted by operator: matrix products exactly, memory by what is read and written."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from rewrite.memory import estimate_step
from rewrite.memory.rates import PEAK_RATES


def test_a_linear_layer() -> None:
    estimate = estimate_step(nn.Linear(64, 32, bias=False), torch.randn(16, 64).requires_grad_())

    assert estimate.flops.forward == 2 * 16 * 64 * 32
    assert estimate.flops.backward == 2 * estimate.flops.forward
    assert estimate.flops.total == 3 * estimate.flops.forward


def test_a_product_added_in_place_counts_as_one() -> None:
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = x.new_zeros(64, 64)
            return total.addmm_(x.t(), x)

    assert estimate_step(Adds(), torch.randn(16, 64), train=False).flops.forward == 2 * 64 * 64 * 16


def test_attention_counts_both_products() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.scale
            return functional.scaled_dot_product_attention(x, x, x)

    flops = estimate_step(Attention(), torch.randn(2, 4, 32, 16)).flops

    assert flops.forward == 2 * 2 * (2 * 4) * 32 * 32 * 16
    assert flops.backward == 5 * 2 * (2 * 4) * 32 * 32 * 16


def test_moved_bytes_of_an_elementwise_operator() -> None:
    estimate = estimate_step(nn.ReLU(), torch.randn(1000), train=False)

    assert estimate.moved_bytes == 2 * 4000


@pytest.mark.parametrize("profile", PEAK_RATES)
def test_time_is_the_longer_of_arithmetic_and_traffic(profile: str) -> None:
    rates = PEAK_RATES[profile]
    bound_by_traffic = estimate_step(nn.ReLU(), torch.randn(1000), train=False)
    bound_by_work = estimate_step(
        nn.Linear(4096, 4096, bias=False), torch.empty(4096, 4096, device="meta"), train=False
    )

    assert bound_by_traffic.seconds(profile) == pytest.approx(8000 / rates.bytes)
    assert bound_by_work.seconds(profile) == pytest.approx(2 * 4096**3 / rates.flops)


def test_an_unknown_profile_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        estimate_step(nn.ReLU(), torch.randn(8), train=False).seconds("abacus")
