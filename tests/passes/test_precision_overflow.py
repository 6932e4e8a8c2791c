"""MixedPrecision: where a cast without thought gives inf, NaN or another answer, ours is as good as half can be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from passes import MixedPrecision
from tests.passes import overflow

LEVELS = ("O1", "O2")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SPOTS: dict[str, tuple[Any, torch.Tensor]] = {
    "scores of queries and keys of 40": (overflow.Scores, overflow.normal(scale=40.0)),
    "additive mask of finfo.min, one row masked whole": (lambda: overflow.Scores(masked=True), overflow.normal()),
    "mask filled with finfo.min": (overflow.Filled, overflow.normal()),
    "handwritten norm of 300": (overflow.HandwrittenNorm, torch.full((2, 8, 64), 300.0) + overflow.normal(2)),
    "eps of 1e-12 under a norm of zeros": (lambda: overflow.HandwrittenNorm(1e-12), torch.zeros(2, 8, 64)),
    "mean over an empty mask": (overflow.MeanPool, overflow.normal()),
    "sum of 70,000": (overflow.LongSum, torch.ones(1, 70_000, 4)),
    "GELU written out at 50": (overflow.WrittenGELU, torch.full((2, 8, 64), 50.0) - overflow.normal(2).abs()),
    "logits of 70,000": (overflow.LargeLogits, torch.full((2, 8, 64), 300.0)),
}


def results(model: nn.Module, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """Result and gradients; the sum that is differentiated is scaled down, so that gradients fit where results do."""
    model.zero_grad()
    out = model(hidden)
    (out * (1e-3 / out.numel())).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"result": out.detach(), **found}


@pytest.mark.thinned(24)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spot", SPOTS)
def test_finite_and_within_half_of_double(spot: str, dtype: str, level: str) -> None:
    torch.manual_seed(0)
    build, hidden = SPOTS[spot]
    model = build()
    truth = results(copy.deepcopy(model).double(), hidden.double())
    small = rewrite.optimize(model, [MixedPrecision(level, dtype=dtype)], example_inputs=hidden)
    assert rewrite.report(small).changes
    found = results(small, hidden)
    assert all(value.isfinite().all() for value in found.values())
    exact = truth["result"]
    error = (found["result"].double() - exact).abs().max()
    assert error <= 8 * torch.finfo(DTYPES[dtype]).eps * exact.abs().max().clamp(min=1e-30)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_router_chooses_what_it_chose(dtype: str, level: str) -> None:
    """Rounded router logits send 0.14% (fp16) and 0.93% (bf16) of tokens to other experts."""
    torch.manual_seed(0)
    model = overflow.Router()
    hidden = overflow.normal(8, 512)
    small = rewrite.optimize(model, [MixedPrecision(level, dtype=dtype)], example_inputs=hidden)
    assert rewrite.report(small).changes
    assert torch.equal(small(hidden), model(hidden))
