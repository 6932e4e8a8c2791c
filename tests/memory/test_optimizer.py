"""Optimizer state is counted as the optimizers keep it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rewrite.errors import InputError
from rewrite.memory import estimate_step
from rewrite.memory.optimizer import build_optimizer

INPUTS = torch.randn(4, 300)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 257), nn.Tanh(), nn.Linear(257, 3))


def parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def test_adamw_keeps_two_moments_and_a_count() -> None:
    built = model()
    estimate = estimate_step(built, INPUTS, optimizer="adamw")

    assert estimate.by_category["optimizer"] == 2 * parameter_bytes(built) + 4 * len(list(built.parameters()))
    assert estimate.peak.phase == "optimizer"
    assert estimate.phases["optimizer"] == estimate.peak_bytes


def test_sgd_keeps_nothing() -> None:
    built = model()
    estimate = estimate_step(built, INPUTS, optimizer="sgd")

    assert estimate.by_category["optimizer"] == 0
    assert estimate.optimizer == "sgd"
    assert estimate.peak_bytes == estimate_step(built, INPUTS).peak_bytes


def test_none_and_no_optimizer_are_the_same() -> None:
    built = model()

    assert estimate_step(built, INPUTS, optimizer="none") == estimate_step(built, INPUTS)


def test_frozen_parameters_have_no_state() -> None:
    built = model()
    built[0].requires_grad_(False)
    estimate = estimate_step(built, INPUTS, optimizer="adamw")

    assert estimate.by_category["optimizer"] == 2 * parameter_bytes(built[2]) + 4 * 2


def test_adamw8bit_layout() -> None:
    weight, bias = nn.Parameter(torch.zeros(1000, 5)), nn.Parameter(torch.zeros(100))
    optimizer = build_optimizer("adamw8bit", [weight, bias], "cpu")
    assert optimizer is not None
    state_bytes = sum(tensor.nbytes for tensor in optimizer.state_tensors())

    assert state_bytes == 2 * 5000 + 2 * 4 * 20 + 2 * 4 * 256 + 2 * 4 * 100


def test_adamw8bit_agrees_with_bitsandbytes() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    built = model()
    real = bitsandbytes.optim.AdamW8bit(built.parameters(), lr=1e-3)
    built(INPUTS).sum().backward()
    real.step()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for state in real.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    }

    assert estimate_step(built, INPUTS, optimizer="adamw8bit").by_category["optimizer"] == sum(storages.values())


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(InputError, match=r"optimizer 'lion'.*\n.*adamw8bit"):
        estimate_step(model(), INPUTS, optimizer="lion")
