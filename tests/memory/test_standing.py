"""A rewritten model is measured by the code that it runs, whatever tensors its modules hold beside parameters."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint
from rewrite.identity import identity, standing_for
from rewrite.memory.allocator import allocated_peak_bytes

WIDTH = 64


class Holder(nn.Module):
    """A block that multiplies by a tensor which it holds in one way or another."""

    def __init__(self, hold: Callable[[nn.Module, torch.Tensor], None]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        hold(self, torch.linspace(0, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale if isinstance(self.scale, torch.Tensor) else next(iter(vars(self.scale).values()))[0]
        return x + self.down(torch.tanh(self.up(x * scale)).sin())


class Recurrent(nn.Module):
    """A block whose layer holds its parameters in a list too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x)[0])


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "attribute": lambda: Holder(lambda block, value: setattr(block, "scale", value)),
    "options": lambda: Holder(lambda block, value: setattr(block, "scale", SimpleNamespace(values=[value]))),
    "parameter": lambda: Holder(lambda block, value: setattr(block, "scale", nn.Parameter(value))),
    "gru": lambda: Recurrent("GRU"),
    "rnn": lambda: Recurrent("RNN"),
    "lstm": lambda: Recurrent("LSTM"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_what_recomputing_saves_is_seen(name: str) -> None:
    model, x = Stack(BLOCKS[name]), torch.randn(16, 32, WIDTH)
    small = rewrite.optimize(model, [Checkpoint(policy="blocks")], example_inputs=x)
    before, after = rewrite.estimate(model, x), rewrite.estimate(small, x)
    assert after.saved_bytes < 0.5 * before.saved_bytes
    assert allocated_peak_bytes(small, x) == pytest.approx(after.peak_bytes, rel=0.002)


def test_a_stand_in_is_taken_for_what_it_stands_for_within_the_block_alone() -> None:
    one, other = torch.zeros(1), torch.ones(1)
    with standing_for([(one, other)]):
        assert identity(other) == identity(one) == id(one)
    assert identity(other) == id(other)


def test_what_is_counted_without_code_is_said() -> None:
    model, x = Stack(BLOCKS["attribute"]), torch.randn(16, 32, WIDTH)
    small = rewrite.optimize(model, [Checkpoint(policy="blocks")], example_inputs=x)
    assert not rewrite.estimate(small, x).assumptions
    forward = vars(small.blocks[1])["forward"]  # type: ignore[union-attr, index, operator]
    forward.table.clear()
    vars(small)["forward"].table.clear()
    forward.rewriting.failed.clear()
    vars(small)["forward"].rewriting.without_graph = {("", vars(small)["forward"].flags())}
    told = rewrite.estimate(small, x).assumptions
    assert told == ("blocks.1: counted as its own forward runs, for there is no code for it",)
