"""Measuring leaves no trace on the module, its gradients or the random generators."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from rewrite.memory import estimate_step
from tests.memory.models import MODELS


class Restless(nn.Module):
    """Changes everything about itself in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(1))
        self.scale = torch.full((8,), 2.0)
        self.calls = 0
        self.history: list[torch.Tensor] = []
        self.table = {"last": torch.zeros(8)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.add_(1)
        self.seen = self.seen + 1
        x = self.norm(self.linear(x)) * self.scale
        self.history.append(x)
        self.table["last"] = x
        self.late = x
        return nn.functional.dropout(x, 0.5).sum() + numpy.random.rand() + random.random()


def everything(module: nn.Module) -> list[tuple[str, str, Any, Any]]:
    found = []
    for path, each in module.named_modules():
        for name, value in each.__dict__.items():
            inside = dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else None
            found.append((path, name, id(value), repr(inside)))
    return found


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_module_is_as_it_was(real: bool) -> None:
    module = Restless()
    module.linear.weight.grad = torch.ones(8, 8)
    state = {key: value.clone() for key, value in module.state_dict().items()}
    before = everything(module), [id(p) for p in module.parameters()], torch.get_rng_state(), random.getstate()
    numpy_before = numpy.random.get_state()[1].tolist()
    estimate_step(module, torch.randn(4, 8, generator=torch.Generator()), optimizer="adamw", real=real)

    assert before[0] == everything(module)
    assert before[1] == [id(p) for p in module.parameters()]
    assert torch.equal(before[2], torch.get_rng_state())
    assert before[3] == random.getstate()
    assert numpy_before == numpy.random.get_state()[1].tolist()
    assert all(torch.equal(state[key], value) for key, value in module.state_dict().items())
    assert module.linear.weight.grad.sum() == 64
    assert module.linear.bias.grad is None
    assert not any(isinstance(p, FakeTensor) for p in module.parameters())
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


def test_module_is_as_it_was_after_an_error() -> None:
    class Failing(Restless):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise ValueError("no more")

    module = Failing()
    before = everything(module)
    with pytest.raises(ValueError, match="no more"):
        estimate_step(module, torch.randn(4, 8))

    assert before == everything(module)
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl


def test_eval_flags_stay_and_frozen_parts_stay_in_eval_while_measured() -> None:
    module = Restless()
    module.norm.eval()
    estimate_step(module, torch.randn(4, 8))
    assert module.training
    assert not module.norm.training

    module.eval()
    estimate_step(module, torch.randn(4, 8))
    assert not any(each.training for each in module.modules())


def test_meta_device_is_the_same_as_real() -> None:
    torch.manual_seed(0)
    model, inputs = MODELS["gpt2"]()
    with torch.device("meta"):
        on_meta, _ = MODELS["gpt2"]()
    real, meta = estimate_step(model, inputs), estimate_step(on_meta, inputs)

    assert (real.peak_bytes, real.saved_bytes) == (meta.peak_bytes, meta.saved_bytes)
    assert all(parameter.is_meta for parameter in on_meta.parameters())


def test_tied_weights_count_once() -> None:
    embedding, head = nn.Embedding(100, 16), nn.Linear(16, 100, bias=False)
    head.weight = embedding.weight
    estimate = estimate_step(nn.Sequential(embedding, head), torch.arange(8))

    assert estimate.by_category["parameter"] == 100 * 16 * 4


def test_views_of_one_storage_count_it_once() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.zeros(64)
            self.a = nn.Parameter(flat[:32])
            self.b = nn.Parameter(flat[32:])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.a + self.b).sum()

    assert estimate_step(Views(), torch.randn(32)).by_category["parameter"] == 256
