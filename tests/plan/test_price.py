"""What a recompute is said to cost: the order of choices on a core, and times measured on the machine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rewrite
from rewrite.errors import InputError
from rewrite.memory.rates import PEAK_RATES
from rewrite.plan.calibrate import node_seconds
from rewrite.plan.outline import Kind, outline
from rewrite.plan.profile import Profile
from rewrite.plan.stage import staged


class Mixed(nn.Module):
    """A linear layer, an activation, a norm, a dropout and a softmax, all over (tokens, width)."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(width, width), nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.linear(hidden))
        hidden = torch.softmax(self.dropout(self.norm(hidden)), -1)
        return (hidden + 1).pow(2).mean()


def profiled(device: str, model: nn.Module | None = None) -> tuple[Kind, dict[str, float]]:
    model = model or Mixed()
    with staged(model) as stage:
        (kind,) = outline(rewrite.capture(model, torch.randn(512, 256)), stage, PEAK_RATES[device]).kinds.values()
    assert isinstance(kind.profile, Profile)
    return kind, {node.name: node.seconds for node in kind.profile.nodes}


def test_on_a_core_drawing_a_mask_and_matrix_work_are_dear_and_elementwise_work_is_cheap() -> None:
    _, seconds = profiled("cpu")

    assert seconds["linear"] > 5 * seconds["gelu"]
    assert seconds["dropout"] > 5 * seconds["norm"]
    assert seconds["linear"] > seconds["norm"] >= 0.9 * seconds["gelu"]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("device", ["h100", "a100", "rtx4090", "t4"])
def test_on_a_gpu_drawing_a_mask_costs_no_more_than_writing_it(device: str) -> None:
    _, seconds = profiled(device)

    assert seconds["dropout"] <= 4 * seconds["norm"]


def test_a_dropout_is_run_again_from_its_mask_for_less_than_drawing_it() -> None:
    kind, _ = profiled("cpu")
    assert kind.profile is not None
    (dropout,) = [node for node in kind.profile.nodes if node.name == "dropout"]

    assert dropout.mask_bytes == 512 * 256
    assert dropout.masked_seconds + dropout.mask_seconds < dropout.seconds / 2


def test_measured_times_name_every_node_and_leave_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Dropout(0.5))
    model.get_submodule("1").register_buffer("extra", torch.ones(3))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    kind, seconds = profiled("cpu", model)
    stream = torch.get_rng_state()
    measured = node_seconds(kind)

    assert seconds.keys() <= measured.keys()
    assert all(value >= 0 for value in measured.values())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(stream, torch.get_rng_state())


def test_a_model_without_data_cannot_be_timed() -> None:
    with torch.device("meta"):
        model = Mixed()
    kind, _ = profiled("cpu", model)

    with pytest.raises(InputError, match="meta device"):
        node_seconds(kind)
