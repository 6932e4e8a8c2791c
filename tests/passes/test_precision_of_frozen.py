"""MixedPrecision over frozen parts, quantized layers and adapters: near what the same model computes in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint, DetachFrozen, MixedPrecision, QuantizeFrozen
from rewrite.weight_casts import copies
from tests.passes import frozen, quantized

LEVELS = pytest.mark.parametrize("level", ["O1", pytest.param("O2", marks=pytest.mark.sweep)])
TARGETS = ["q_proj", "v_proj", "down_proj"]


def adapted(**_: Any) -> nn.Module:
    """A frozen llama with LoRA in peft's wrapper."""
    return quantized.with_lora(quantized.llama(), TARGETS)


def near(model: nn.Module, small: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    """Loss, outputs and every gradient no farther off than roundings move them."""
    certificate = rewrite.verify(model, small, inputs)
    assert certificate.passed, certificate.failures[:3]
    assert certificate.numerics == "reduced"
    assert not certificate.skipped


def cast_weights(small: nn.Module) -> list[str]:
    """The weights that the graphs cast, by the path of the first instance."""
    program = rewrite.report(small).after
    assert program is not None
    nodes = (node for region in program.regions for node in region.nodes())
    return [str(node.args[0]) for node in nodes if getattr(node.target, "__name__", "") == "cast_weight"]


ORDERS: dict[str, Callable[[Any, Any], list[Any]]] = {
    "first": lambda one, other: [one, other],
    "last": lambda one, other: [other, one],
}


@LEVELS
@pytest.mark.parametrize("order", ["first", pytest.param("last", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.sweep)])
def test_quantized_layers_are_cast_at_their_boundary(bits: int, order: str, level: str) -> None:
    model, inputs = quantized.bert(), quantized.tokens()
    passes = ORDERS[order](QuantizeFrozen(bits), MixedPrecision(level, dtype="bf16"))
    small = rewrite.optimize(model, passes, example_inputs=inputs)
    near(model, small, inputs)
    assert not [name for name in cast_weights(small) if "encoder" in name]  # they hold few bits, and dequantize to half
    program = rewrite.report(small).after
    assert program is not None
    layer = next(region for region in program.regions if region.path == "bert.encoder.layer.0")
    calls = [node for node in layer.nodes() if node.op == "call_module" and "bit" in type(layer.called(node)).__name__]
    assert len(calls) == 6
    assert {node.meta["val"].dtype for node in calls} == {torch.bfloat16}


@LEVELS
def test_detached_prefixes_are_cast_once_for_good(level: str) -> None:
    model, inputs = frozen.bert(), frozen.batch()
    small = rewrite.optimize(model, [DetachFrozen(), MixedPrecision(level, dtype="bf16")], example_inputs=inputs)
    near(rewrite.optimize(model, [DetachFrozen()], example_inputs=inputs), small, inputs)
    weight = small.bert.encoder.layer[0].intermediate.dense.weight
    small.train()(**inputs).loss.backward()
    before = {id(copy) for copy in copies() if copy.shape == weight.shape}
    small(**inputs).loss.backward()
    assert {id(copy) for copy in copies() if copy.shape == weight.shape} == before


@LEVELS
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("others", [(), pytest.param((Checkpoint(),), marks=pytest.mark.sweep)])
def test_adapters_are_trained(others: tuple[Any, ...], dtype: str, level: str) -> None:
    """huggingface/transformers#42489: LoRA left untrained."""
    model, inputs = adapted(), quantized.tokens(every=True)
    small = rewrite.optimize(model, [MixedPrecision(level, dtype=dtype), *others], example_inputs=inputs)
    near(model, small, inputs)
    small(**inputs).loss.backward()
    adapters = {name: p for name, p in small.named_parameters() if "lora" in name}
    assert len(adapters) == 2 * 2 * len(TARGETS)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.any() for p in adapters.values())


@pytest.mark.sweep
@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_on_quantized_layers_are_trained(bits: int) -> None:
    model, inputs = adapted(), quantized.tokens(every=True)
    passes = [QuantizeFrozen(bits), MixedPrecision(dtype="bf16"), Checkpoint()]
    small = rewrite.optimize(model, passes, example_inputs=inputs)
    near(model, small, inputs)
    small(**inputs).loss.backward()
    assert all(p.grad.any() for name, p in small.named_parameters() if "lora" in name)
