"""oneDNN computes an LSTM's last bits otherwise with grad mode off: rewrites run it as the original does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint, DetachFrozen
from rewrite import Pass
from tests.recompute.models import Subset

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, (state, _) = self.recurrent(x)
        return torch.tanh(self.layer(value) * value) + state[-1].unsqueeze(1)


class Net(nn.Module):
    def __init__(self, *frozen: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(None if each.grad is None else each.grad.clone() for each in model.parameters())]


@pytest.mark.parametrize("frozen", [(), ("recurrent",), ("first", "recurrent"), ("first", "blocks.0")], ids=str)
@pytest.mark.parametrize(
    "chosen", [Checkpoint(policy="blocks"), Checkpoint(policy="cheap"), Subset(state=1.0), DetachFrozen()], ids=str
)
def test_an_lstm_is_bit_equal(frozen: tuple[str, ...], chosen: Pass) -> None:
    torch.manual_seed(0)
    model, x = Net(*frozen), torch.randn(4, 6, WIDTH)
    small = rewrite.optimize(copy.deepcopy(model), [chosen], example_inputs=x)
    for _ in range(3):
        for one, other in zip(gradients(model, x), gradients(small, x), strict=True):
            assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]


def test_an_lstm_under_the_lowest_budget_is_bit_equal() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(4, 6, WIDTH)
    with pytest.raises(rewrite.BudgetError) as raised:
        rewrite.optimize(model, budget=1, example_inputs=x, allow="exact")
    small = rewrite.optimize(copy.deepcopy(model), budget=raised.value.lowest_bytes, example_inputs=x, allow="exact")
    for _ in range(2):
        for one, other in zip(gradients(model, x), gradients(small, x), strict=True):
            assert torch.equal(one, other)  # type: ignore[arg-type]


def test_a_users_own_no_grad_stays() -> None:
    class Frozen(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x = self.blocks[0](x)
            return self.blocks[1](x).pow(2).mean()

    torch.manual_seed(0)
    model, x = Frozen("first"), torch.randn(4, 6, WIDTH)
    small = rewrite.optimize(copy.deepcopy(model), [DetachFrozen()], example_inputs=x)
    for one, other in zip(gradients(model, x), gradients(small, x), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)  # type: ignore[arg-type]
