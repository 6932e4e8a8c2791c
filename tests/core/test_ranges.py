"""`rewrite.ranges` names the values of a real forward that come near what a precision holds."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from rewrite.errors import InputError, VerifyError
from rewrite.value_range import ValueRange
from tests.bisect.models import cool_bert, hot_bert
from tests.passes.overflow import LargeLogits, normal


def by_path(found: rewrite.Ranges) -> dict[str, ValueRange]:
    return {each.path: each for each in found.values}


def test_the_layer_that_overflows_is_named_with_its_line() -> None:
    model, inputs = hot_bert((1,))
    model.eval()
    found = rewrite.ranges(model, inputs)
    paths = [each.path for each in found.near]
    assert "bert.encoder.layer.1.output.dense" in paths
    assert not any("layer.0" in path for path in paths)
    seen: dict[str, torch.Tensor] = {}
    handle = model.bert.encoder.layer[1].output.dense.register_forward_hook(
        lambda module, given, result: seen.update(dense=result.detach())
    )
    model(**inputs)
    handle.remove()
    dense = by_path(found)["bert.encoder.layer.1.output.dense"]
    assert dense.largest == float(seen["dense"].abs().max())
    assert (dense.state, dense.operator) == ("overflow", "nn.Linear")
    assert dense.source.startswith("modeling_bert.py:")
    assert str(found).splitlines()[0].startswith("bert.encoder.layer.1.output.")
    assert rewrite.ranges(model, inputs, "bf16").near == ()


def test_every_instance_of_a_block_is_looked_at_by_itself() -> None:
    model, inputs = cool_bert()
    values = by_path(rewrite.ranges(model.eval(), inputs))
    pair = [values[f"bert.encoder.layer.{layer}.output.add"].largest for layer in range(2)]
    hidden = model(**inputs, output_hidden_states=True).hidden_states
    assert pair[0] != pair[1]
    assert all(map(math.isfinite, pair))
    norm = values["bert.encoder.layer.1.output.LayerNorm"].largest
    assert norm == pytest.approx(float(hidden[2].detach().abs().max()), rel=1e-6)


class Steps(nn.Module):
    """Values of a given size: made by an operator, written in place, seen again through a view."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scaled = hidden * 20_000.0
        turned = scaled.transpose(0, 1).unsqueeze(0)
        later = turned + 0.0
        later.mul_(3.0)
        return later - 1.0


@pytest.mark.parametrize(("share", "expected"), [(0.25, ["sub", "mul", "add"]), (0.5, ["sub", "mul"]), (1.0, [])])
def test_values_count_once_and_above_the_share(share: float, expected: list[str]) -> None:
    found = rewrite.ranges(Steps(), torch.ones(2, 3), share=share)
    assert sorted(each.path for each in found.near) == sorted(expected)
    assert all(each.state == "near" for each in found.near)
    assert by_path(found)["sub"].largest == 59_999.0
    assert by_path(found)["mul"].largest == 60_000.0  # two operators of one name: the larger


def test_overflow_is_what_rounds_to_infinity() -> None:
    class Shift(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + 0.0

    states = [rewrite.ranges(Shift(), torch.tensor([[value]])).near[-1].state for value in (65_519.0, 65_520.0)]
    assert states == ["near", "overflow"]


class Masked(nn.Module):
    """A mask of a given number, added to scores."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, scores: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(scores).masked_fill(scores < 0, self.number)
        return scores + mask


def test_what_masks_are_made_of_does_not_count() -> None:
    for number in (torch.finfo(torch.float32).min, -math.inf):
        assert rewrite.ranges(Masked(number), normal()).near == ()
    for number in (math.nan, math.inf):
        assert {each.state for each in rewrite.ranges(Masked(number), normal()).near} == {"not finite"}
    assert rewrite.ranges(Masked(-1e5), normal()).near[0].state == "overflow"


def test_parameters_and_inputs_are_values_too() -> None:
    model, hidden = LargeLogits(), normal()
    with torch.no_grad():
        model.head.weight.fill_(-70_000.0)
    hidden[0, 0, 0] = 1e6
    near = {each.path: each.operator for each in rewrite.ranges(model, hidden).near}
    assert near == {"head.weight": "parameter", "hidden": "input", "head": "nn.Linear"}


def test_the_model_and_the_random_stream_are_left_as_they_were() -> None:
    model, inputs = cool_bert()
    before, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    rewrite.ranges(model, inputs)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream)
    assert model.training
    assert "forward" not in vars(model)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", ["fp8ish", "int8", torch.int64])
def test_a_dtype_is_a_floating_point_one(dtype: Any) -> None:
    with pytest.raises(InputError, match="is no floating-point dtype"):
        rewrite.ranges(Steps(), torch.ones(2, 3), dtype)


def test_a_model_without_numbers_is_refused() -> None:
    with pytest.raises(VerifyError, match="meta device"):
        rewrite.ranges(nn.Linear(2, 2, device="meta"), torch.ones(1, 2))
