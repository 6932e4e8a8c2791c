"""Reports of users about quantized models and the memory of LoRA."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import peft
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn

import rewrite
from passes import Checkpoint, ChunkLoss, QuantizeFrozen
from rewrite.diff.compare import view
from rewrite.report.show import show_lines
from tests.passes.quantized import bert, llama, step, tokens, weight_bytes, with_lora

LORA = ["q_proj", "v_proj", "down_proj"]
INPUTS = tokens(every=True, size=4, length=48)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=pytest.mark.sweep)])
def test_preparing_keeps_the_bytes(bits: int, accelerator: Accelerator) -> None:
    """huggingface/accelerate#1902: "8-bit model becomes 32-bit after prepare"."""
    small = rewrite.optimize(bert(), [QuantizeFrozen(bits), Checkpoint()], example_inputs=tokens())
    before = weight_bytes(small, nn.Linear)
    expected = step(small, tokens())[0]
    optimizer = rewrite.optimizer(small, "adamw8bit", lr=1e-3)
    prepared, optimizer = accelerator.prepare(small, optimizer)

    assert weight_bytes(prepared, nn.Linear) == before
    assert torch.equal(step(prepared, tokens())[0], expected)
    dtypes = {layer.weight.dtype for layer in prepared.modules() if hasattr(layer, "stored_bits")}
    assert dtypes == {{8: torch.int8, 4: torch.uint8}[bits]}
    accelerator.backward(prepared(**tokens()).loss)
    optimizer.step()
    assert weight_bytes(prepared, nn.Linear) == before


def test_pefts_preparation_keeps_the_bytes() -> None:
    """The same with `prepare_model_for_kbit_training`, which brings parameters to 32 bits."""
    small = rewrite.optimize(bert(), [QuantizeFrozen(8)], example_inputs=tokens())
    small.is_loaded_in_8bit = True
    before = weight_bytes(small, nn.Linear)
    prepared = peft.prepare_model_for_kbit_training(small, use_gradient_checkpointing=False)

    assert weight_bytes(prepared, nn.Linear) == before


def test_what_lora_keeps_is_named() -> None:
    """huggingface/peft#2196, #1514: "LoRA uses more memory than full fine-tuning"."""
    base, lora = llama(), with_lora(llama(), LORA)
    base.model.embed_tokens.requires_grad_(True)  # what LoRA needs gradients for, without LoRA
    captured = rewrite.optimize(lora, [], example_inputs=INPUTS)
    before = rewrite.report(captured).before
    assert before is not None
    told = rewrite.estimate(captured, INPUTS)
    text = "\n".join(map(str, show_lines(view("lora", before, told), 120)))
    kept = {place.module_path for place in told.saved if "lora_" in place.module_path}
    without = rewrite.estimate(base, INPUTS)

    targets = [*(f"self_attn.{name}" for name in LORA[:2]), "mlp.down_proj"]
    dropouts = {
        f"base_model.model.model.layers.{layer}.{target}.lora_dropout.default"
        for layer in range(2)
        for target in targets
    }
    assert dropouts <= kept
    assert all(f"{target}.lora_dropout.default" in text for target in targets)
    on_top = sum(place.bytes for place in told.saved if "lora_" in place.module_path)
    assert 0 < told.saved_bytes - without.saved_bytes <= on_top


def test_lora_takes_less_than_full_training_with_the_passes() -> None:
    """huggingface/peft#2196, #1514, the remedy: what LoRA keeps is recomputed, what is frozen is stored in 4 bits."""
    full = llama().requires_grad_(True)
    lora = with_lora(llama(), LORA)
    small = rewrite.optimize(copy.deepcopy(lora), [QuantizeFrozen(4), ChunkLoss(), Checkpoint()], example_inputs=INPUTS)
    peaks = [rewrite.estimate(each, INPUTS, optimizer="adamw").peak_bytes for each in (full, lora, small)]

    assert peaks[2] < 0.6 * peaks[1] < 0.6 * peaks[0]
