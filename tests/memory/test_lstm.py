"""An LSTM on a CPU, whose workspace torch's fakes leave out, against the allocator's own account of the same step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint
from rewrite.memory.allocator import allocated_peak_bytes
from rewrite.memory.lstm_scratch import workspace_bytes

SIZES = {
    "plain": (64, 128, 1, False, True, 8, 64),
    "wide rows": (256, 256, 2, False, True, 16, 40),
    "both ways": (100, 96, 3, True, True, 3, 30),
    "steps first": (20, 300, 2, True, False, 17, 5),
    "one step": (100, 30, 1, False, True, 3, 1),
}
"""Widths of input and state, layers, both ways, batch first, batch, length."""


class Tagger(nn.Module):
    def __init__(self, inputs: int, width: int, layers: int, both: bool, batch_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Linear(inputs, inputs)
        self.recurrent = nn.LSTM(inputs, width, layers, bidirectional=both, batch_first=batch_first, dropout=0.1)
        self.head = nn.Linear(width * (1 + both), inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.embedding(x).tanh())[0]).pow(2).mean()


@pytest.mark.filterwarnings("ignore:dropout option adds dropout")
@pytest.mark.parametrize("name", SIZES)
def test_a_step_of_an_lstm(name: str) -> None:
    inputs, width, layers, both, batch_first, batch, length = SIZES[name]
    model, x = Tagger(inputs, width, layers, both, batch_first), torch.randn(batch, length, inputs)
    expected = allocated_peak_bytes(model, x)
    assert rewrite.estimate(model, x).peak_bytes == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize(("inputs", "width"), [(16, 16), (64, 128), (128, 64), (60, 100), (512, 256), (256, 256)])
def test_the_workspace_is_the_one_that_is_handed_out(inputs: int, width: int) -> None:
    for length, batch in ((1, 1), (10, 4), (65, 8)):
        x, state = torch.randn(length, batch, inputs), torch.zeros(batch, width)
        weights = [torch.randn(4 * width, inputs), torch.randn(4 * width, width), *torch.randn(2, 4 * width)]
        given = (x, *weights, state, state, False, [], 2, width, 1, True, False, False, True)
        made = torch.ops.aten.mkldnn_rnn_layer(*given)
        assert workspace_bytes(x, weights[1]) == made[3].nbytes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.norm = nn.LSTM(96, 96, batch_first=True), nn.LayerNorm(96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.recurrent(x)[0])


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def test_recomputed_layers_hold_one_workspace_and_are_estimated_right() -> None:
    model, x = Layers(), torch.randn(8, 64, 96)
    small = rewrite.optimize(model, [Checkpoint(policy="blocks")], example_inputs=x)
    before, after = rewrite.estimate(model, x).peak_bytes, rewrite.estimate(small, x).peak_bytes
    assert after < 0.6 * before
    assert allocated_peak_bytes(small, x) == pytest.approx(after, rel=0.005)

    model.zero_grad()
    model(x).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    small(x).backward()
    assert all(torch.equal(one, other.grad) for one, other in zip(expected, small.parameters(), strict=True))


def test_a_budget_holds_for_layers_with_an_lstm() -> None:
    model, x = Layers(), torch.randn(8, 64, 96)
    budget = int(rewrite.estimate(model, x).peak_bytes * 0.6)
    small = rewrite.optimize(model, budget=budget, example_inputs=x, allow="exact")
    assert allocated_peak_bytes(small, x) <= budget * 1.005
