"""A rewrite of reduced precision is held to how far rounding moves the model: no closer, and no farther."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from passes import MixedPrecision
from passes.islands import Islands
from rewrite import weight_casts
from rewrite.certificate import Row
from rewrite.observation import observe
from rewrite.sensitivity import Sensitivity, _Noise
from tests.passes import overflow
from tests.zoo import ZOO
from tests.zoo.plain import GatedBlock

BY_DEFAULT = ("plain-resnet", "fp16")
"""ReLUs and norms over two images, whose gradients rounding moves far."""


def certificate(name: str, **options: Any) -> rewrite.Certificate:
    entry = ZOO[name]
    model, inputs = entry.build(), entry.inputs(*entry.shapes[0], entry.masks[0])
    return rewrite.verify(model, rewrite.optimize(model, [MixedPrecision(**options)], example_inputs=inputs), inputs)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) == BY_DEFAULT else pytest.mark.sweep)
        for name in ZOO
        for dtype in ("fp16", "bf16")
    ],
)
def test_casts_pass(name: str, dtype: str) -> None:
    found = certificate(name, dtype=dtype)
    assert found.passed, found.summary
    assert found.numerics == "reduced"


def test_the_precision_is_that_of_the_pass() -> None:
    model, hidden = GatedBlock(64), overflow.normal()
    fine, coarse = (
        {
            row.name: row.tolerance
            for row in rewrite.verify(
                model, rewrite.optimize(model, [MixedPrecision(dtype=dtype)], example_inputs=hidden), hidden
            ).rows
            if row.kind == "gradient"
        }
        for dtype in ("fp16", "bf16")
    )
    assert fine.keys() == coarse.keys()
    assert all(4 * fine[name] < coarse[name] < 16 * fine[name] for name in fine)


def test_a_dropped_gradient_fails_however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of llama's queries are a thousandth of the largest."""
    entry = ZOO["llama"]
    model = entry.build()
    query = model.model.layers[0].self_attn.q_proj.weight

    def without_queries(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (grads[0].float() * (grads[0].shape != query.shape), None)

    inputs = entry.inputs(*entry.shapes[0], entry.masks[0])
    small = rewrite.optimize(model, [MixedPrecision(dtype="bf16")], example_inputs=inputs)
    monkeypatch.setattr(weight_casts._Cast, "backward", staticmethod(without_queries))
    failed = {row.name for row in rewrite.verify(model, small, inputs).failures}
    assert "model.layers.0.self_attn.q_proj.weight" in failed


def test_scores_that_overflow_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, hidden = overflow.Scores(), overflow.normal(scale=40.0)
    whole = rewrite.optimize(model, [MixedPrecision()], example_inputs=hidden)
    assert rewrite.verify(model, whole, hidden).passed
    monkeypatch.setattr(Islands, "unsafe", lambda _: set())
    monkeypatch.setattr("passes.casting.scale_scores_first", lambda _: None)
    broken = rewrite.optimize(model, [MixedPrecision()], example_inputs=hidden)
    assert not rewrite.verify(model, broken, hidden).passed


def test_a_norm_in_half_fails() -> None:
    """The squares of 300 do not fit in fp16, and under O3 nothing stays in fp32."""
    torch.manual_seed(0)
    model, hidden = overflow.HandwrittenNorm(), 300.0 + overflow.normal()
    one, three = (
        rewrite.verify(model, rewrite.optimize(model, [MixedPrecision(level)], example_inputs=hidden), hidden)
        for level in ("O1", "O3")
    )
    assert one.passed, one.summary
    assert {row.kind for row in three.failures} >= {"output", "gradient"}


class TwoRows(nn.Module):
    """A batch norm that sees two rows makes 1 and -1 of them, whatever they are: its gradient is all rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, affine=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.first(hidden))).sum()


def test_values_of_which_rounding_leaves_nothing_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, rows = TwoRows(), 100 * torch.randn(2, 8)
    small = rewrite.optimize(model, [MixedPrecision(dtype="bf16")], example_inputs=rows)
    found = rewrite.verify(model, small, rows)
    assert found.passed, found.failures
    told = r"train, batch 2, seed 0: gradient: roundings to bfloat16 move it by \d+%, so that nearness says little"
    assert re.match(told, found.skipped[0])
    monkeypatch.setattr(weight_casts._Cast, "backward", staticmethod(lambda _, grad: (torch.zeros(grad.shape), None)))
    dropped = rewrite.verify(model, small, rows).failures
    assert {"first.weight", "first.bias"} <= {row.name for row in dropped}


def test_measuring_leaves_the_model_and_the_streams_as_they_were() -> None:
    model, hidden = GatedBlock(16), torch.randn(3, 4, 16)
    stream, kept = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    expected = observe(model, (hidden,), {}, seed=0, train=True)
    moved = Sensitivity(model, torch.bfloat16).of(expected, (hidden,), {}, seed=0, train=True)
    (row,) = moved.widened([Row("loss", "loss", False, 1e-9, 1e-9)], expected)
    assert moved.pairs == 1  # one was enough
    assert row.passed
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    again = observe(model, (hidden,), {}, seed=0, train=True)
    assert torch.equal(again.loss, expected.loss)


def test_a_value_that_large_terms_cancel_in_is_allowed_their_rounding() -> None:
    """The gradient of a key's bias is zero but for rounding: softmax forgets what is added to a whole row."""
    found = certificate("opt", dtype="fp16")
    assert found.passed, found.summary
    biases = [row for row in found.rows if row.name.endswith("k_proj.bias")]
    assert biases
    assert all(row.passed and row.max_rel > 1 for row in biases if row.kind == "gradient")


def test_below_the_normal_numbers_a_rounding_does_not_shrink() -> None:
    noise = _Noise(1.0, torch.float16, 2.0**16, seed=0)
    value = torch.tensor([0.0, 1e-7, 1.0, torch.finfo(torch.float32).min])
    assert (noise.forward(value) - value).abs().tolist() == pytest.approx([0.0, 2.0**-25, 2.0**-11, 0.0], rel=0.2)
    assert float((noise.backward(value) - value)[1].abs()) == pytest.approx(1e-7 * 2.0**-11, rel=0.2)
