"""Mixed precision in bytes: what a step saves, predicted and measured."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

import rewrite
from passes import MixedPrecision
from rewrite.memory import estimate_step, tracker
from rewrite.memory.allocator import allocated_peak_bytes, allocated_rise_bytes
from rewrite.memory.scratch import scratch_bytes
from tests.memory.models import MODELS

MIB = 2**20
aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)
NATIVE = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default, aten.convolution_backward.default
}  # fmt: skip
SAVED_AT_MOST = {"O1": 0.65, "O2": 0.65, "O3": 0.52}
"""Saved activations over those in fp32."""


def llama(layers: int, vocabulary: int = 32_000) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The default llama of so many layers, on the meta device, with a batch of one sequence of 2048."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=vocabulary))
    ids = torch.zeros(1, 2048, dtype=torch.long, device="meta")
    return model, {"input_ids": ids, "labels": ids}


def assert_saves(level: str, layers: int, vocabulary: int = 32_000) -> None:
    model, inputs = llama(layers, vocabulary)
    plain = rewrite.estimate(model, inputs, device="cuda")
    small = rewrite.optimize(model, [MixedPrecision(level)], example_inputs=inputs)
    made = rewrite.estimate(small, inputs, device="cuda")
    assert made.saved_bytes <= SAVED_AT_MOST[level] * plain.saved_bytes
    held = sum(parameter.nbytes for parameter in model.parameters())
    if level == "O3":
        assert made.peak_bytes <= 0.55 * plain.peak_bytes
        assert made.by_category["parameter"] == held // 2
        return
    products = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    assert made.by_category["parameter"] == held + sum(p.nbytes for p in products) // 2  # each copied once


@pytest.mark.thinned(3)
@pytest.mark.parametrize("level", SAVED_AT_MOST)
def test_a_llama_planned_for_cuda_saves_as_much_less(level: str) -> None:
    """Two blocks of its size, with a vocabulary so small that the loss weighs as little as it does in 32 blocks."""
    assert_saves(level, 2, 1000)


@pytest.mark.sweep
@pytest.mark.parametrize("level", SAVED_AT_MOST)
def test_the_default_llama_planned_for_cuda_saves_as_much_less(level: str) -> None:
    assert_saves(level, 32)


def small_llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=4, vocab_size=500, pad_token_id=0)  # fmt: skip
    ids = torch.randint(1, 500, (4, 64))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_predicted_is_measured(level: str) -> None:
    assert_measured(*small_llama(), level)


@pytest.mark.sweep
@pytest.mark.parametrize("level", ["O1", "O3"])
@pytest.mark.parametrize("name", ["bert", "llama", "vit", "resnet"])
def test_predicted_is_measured_in_larger_models(name: str, level: str) -> None:
    torch.manual_seed(0)
    assert_explained(*MODELS[name](), level)


def taken_bytes(func: Any, args: Any, out: Any) -> int:
    """Of an operator that has run, what it takes beside its results: in half precision by running it once more.

    Where a processor multiplies in half precision itself, oneDNN takes room for blocks of its own choice.
    """
    halves = [each for each in args if isinstance(each, torch.Tensor) and each.dtype in HALVES]
    if func not in NATIVE or not halves:
        return scratch_bytes(func, args, out)
    made: list[Any] = []
    taken = allocated_rise_bytes(lambda: made.append(func(*args)))
    return taken - sum(each.nbytes for each in tree_leaves(made) if each is not None)


def assert_explained(model: nn.Module, inputs: dict[str, torch.Tensor], level: str) -> None:
    """What is predicted is what a real run counts, and with what its products take it is what the allocator hands out.

    On a processor without such instructions the two are one.
    """
    torch.set_num_threads(1)
    small = rewrite.optimize(model, [MixedPrecision(level)], example_inputs=inputs)
    predicted = estimate_step(small, inputs)
    measured = estimate_step(small, inputs, real=True)
    assert predicted.saved_bytes == pytest.approx(measured.saved_bytes, rel=0.01)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.01)
    with mock.patch.object(tracker, "scratch_bytes", taken_bytes):
        whole = estimate_step(small, inputs, real=True)
    assert whole.peak_bytes == pytest.approx(allocated_peak_bytes(small, inputs), rel=0.01, abs=MIB // 16)


def assert_measured(model: nn.Module, inputs: dict[str, torch.Tensor], level: str) -> None:
    torch.set_num_threads(1)
    small = rewrite.optimize(model, [MixedPrecision(level)], example_inputs=inputs)
    predicted = estimate_step(small, inputs)
    measured = estimate_step(small, inputs, real=True)
    assert predicted.saved_bytes == pytest.approx(measured.saved_bytes, rel=0.01)
    assert predicted.peak_bytes == pytest.approx(allocated_peak_bytes(small, inputs), rel=0.01, abs=MIB // 16)


class HalfFrozen(nn.Module):
    """A frozen weight in half precision that the forward widens, after an adapter that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(256, 256).half(), requires_grad=False)
        self.adapter = nn.Linear(256, 256)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (self.adapter(hidden) @ self.frozen.float()).tanh()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_no_wide_copy_of_a_frozen_half_weight_is_saved(level: str) -> None:
    model, hidden = HalfFrozen(), torch.randn(8, 256)
    small = rewrite.optimize(model, [MixedPrecision(level)], example_inputs=hidden)
    wide = [each for each in rewrite.estimate(model, hidden).saved if each.shape == (256, 256)]
    assert [each.dtype for each in wide] == ["float32"]
    assert [each for each in rewrite.estimate(small, hidden).saved if each.shape == (256, 256)] == []
