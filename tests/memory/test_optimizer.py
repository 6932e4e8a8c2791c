"""Optimizer state is counted as the optimizers keep it, and their step as it allocates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rewrite
from rewrite.errors import InputError
from rewrite.memory import estimate_step
from rewrite.memory.allocator import allocated_peak_bytes, allocated_rise_bytes
from rewrite.memory.optimizer import build_optimizer
from rewrite.optim.kinds import KINDS

INPUTS = torch.randn(4, 300)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(300, 257), nn.Tanh(), nn.Linear(257, 3))


class Tagger(nn.Module):
    """An embedding, large and small layers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 64, dtype=dtype)
        self.norm = nn.LayerNorm(64, dtype=dtype)
        self.layer = nn.Linear(64, 300, dtype=dtype)
        self.head = nn.Linear(300, 5, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(torch.tanh(self.layer(self.norm(self.embedding(ids)))))
        return hidden


IDS = torch.arange(40).reshape(4, 10)


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


@pytest.mark.parametrize("name", ["adamw", "adam8bit"])
def test_parameters_that_get_no_gradient_have_no_state(name: str) -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(300, 257), nn.Linear(300, 257)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.used(hidden)
            return result

    built = Partly()
    counted = estimate_step(built, INPUTS, optimizer=name)
    alone = estimate_step(built.used, INPUTS, optimizer=name)

    assert counted.by_category["optimizer"] == alone.by_category["optimizer"] > 0
    assert counted.peak_bytes == alone.peak_bytes + parameter_bytes(built.idle)
    assert counted.peak_bytes == pytest.approx(allocated_peak_bytes(built, INPUTS, optimizer=name), rel=1e-3)


def test_adamw8bit_layout() -> None:
    built = nn.Linear(5, 1000)
    optimizer = build_optimizer("adamw8bit", built, "cpu")
    assert optimizer is not None
    state_bytes = sum(tensor.nbytes for tensor in optimizer.state_tensors())

    assert state_bytes == 2 * 5000 + 2 * 4 * 20 + 2 * 4 * 256 + 2 * 4 * 1000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(KINDS))
def test_the_state_is_that_of_the_real_optimizer(name: str, dtype: torch.dtype) -> None:
    built = Tagger(dtype)
    real = rewrite.optimizer(built, name, lr=1e-3)
    built(IDS).sum().backward()
    real.step()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for state in real.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor)
    }

    counted = estimate_step(built, IDS, optimizer=name).by_category["optimizer"]
    assert counted == sum(storages.values())
    assert (counted == 0) == (name == "sgd")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(kind.name for kind in KINDS.values() if kind.library == "bitsandbytes"))
def test_a_step_allocates_what_the_real_one_does(name: str, dtype: torch.dtype) -> None:
    built = Tagger(dtype)
    real = rewrite.optimizer(built, name, lr=1e-3)
    built(IDS).sum().backward()
    real.step()
    stand_in = build_optimizer(name, built, "cpu")
    assert stand_in is not None

    assert allocated_rise_bytes(stand_in.step) == allocated_rise_bytes(real.step)


def test_a_step_on_cuda_is_in_place() -> None:
    built = model()
    estimate = estimate_step(built, INPUTS, optimizer="adamw8bit", device="cuda")
    on_cpu = estimate_step(built, INPUTS, optimizer="adamw8bit", device="cpu")

    assert estimate.by_category["optimizer"] == on_cpu.by_category["optimizer"] > 2 * 300 * 257
    assert "optimizer" not in estimate.phases
    assert on_cpu.phases["optimizer"] == on_cpu.peak_bytes > estimate.peak_bytes


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(InputError, match=r"optimizer 'lamb'.*\n.*adamw8bit"):
        estimate_step(model(), INPUTS, optimizer="lamb")
