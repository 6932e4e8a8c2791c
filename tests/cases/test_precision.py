"""Reports of mixed precision going wrong, replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from passes import MixedPrecision
from rewrite.text import program_text
from tests.passes.overflow import HandwrittenNorm, normal
from tests.zoo import ZOO

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_row_that_is_masked_whole_is_finite(attention: str, level: str) -> None:
    """huggingface/transformers#17306, #17437: an additive mask of finfo.min overflows, and the softmax is NaN."""
    entry = ZOO["bert"]
    model = entry.build()
    model.set_attn_implementation(attention)
    inputs = entry.inputs(2, 8, "padded")
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    inputs["attention_mask"][1] = 0
    small = rewrite.optimize(model, [MixedPrecision(level)], example_inputs=inputs)
    found, expected = small.eval()(**inputs), model.eval()(**inputs)
    assert found.loss.isfinite()
    torch.testing.assert_close(found.logits, expected.logits, rtol=2e-2, atol=2e-2)
    found.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


class FloatMask(nn.Module):
    """Fused attention with a mask of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key = (each(hidden).unsqueeze(1) for each in (self.query, self.key))
        return nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=mask)


@pytest.mark.parametrize("dtype", HALF)
def test_a_mask_of_the_least_number_keeps_to_the_new_dtype(dtype: str) -> None:
    """The same: the fp32 number, cast to fp16, is -inf, and a row of it NaN."""
    mask = torch.full((4, 1, 8, 8), torch.finfo(torch.float32).min)
    mask[:2] = 0.0
    model, hidden = FloatMask(), normal()
    small = rewrite.optimize(model, [MixedPrecision(dtype=dtype)], example_inputs=(hidden, mask))
    found = small(hidden, mask)
    assert found.isfinite().all()
    seen = slice(0, 2)  # of a row that is masked whole, nothing is asked but numbers
    torch.testing.assert_close(found[seen], model(hidden, mask)[seen], rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_handwritten_norm_of_300_is_finite(level: str) -> None:
    """pytorch/pytorch#66707, meta-llama/llama#1048."""
    model, hidden = HandwrittenNorm(), torch.full((2, 4, 64), 300.0)
    small = rewrite.optimize(model, [MixedPrecision(level)], example_inputs=hidden)
    torch.testing.assert_close(small(hidden), model(hidden), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_no_cast_undoes_another(name: str) -> None:
    """microsoft/onnxconverter-common#271: casts back and forth."""
    entry = ZOO[name]
    small = rewrite.optimize(
        entry.build(), [MixedPrecision()], example_inputs=entry.inputs(*entry.shapes[0], entry.masks[0])
    )
    program = rewrite.report(small).after
    assert program is not None
    for region in program.regions:
        for node in region.nodes():
            if node.target == "to" and isinstance(node.meta.get("val"), torch.Tensor):
                (source,) = node.all_input_nodes
                assert source.target != "to" or not source.meta["val"].is_floating_point(), program_text(program)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_are_fp32_and_can_be_unscaled(level: str) -> None:
    """huggingface/diffusers#8871, haotian-liu/LLaVA#363: "Attempting to unscale FP16 gradients"."""
    entry = ZOO["bert"]
    inputs = entry.inputs(2, 8)
    small = rewrite.optimize(entry.build(), [MixedPrecision(level)], example_inputs=inputs)
    scaler, optimizer = rewrite.loss_scaler(small, init_scale=64.0), torch.optim.AdamW(small.parameters())
    scaler.scale(small(**inputs).loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert {p.grad.dtype for p in small.parameters() if p.grad is not None} == {torch.float32}


def test_accelerates_autocast_changes_nothing() -> None:
    """accelerate wraps the forward in autocast, and its outputs in casts to fp32."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    entry = ZOO["bert"]
    inputs = entry.inputs(2, 8)
    small = rewrite.optimize(entry.build(), [MixedPrecision()], example_inputs=inputs).eval()
    expected = small(**inputs).loss
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        wrapped: Any = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(small)
        assert torch.equal(wrapped(**inputs).loss, expected)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
