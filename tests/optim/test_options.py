"""Options of an optimizer go over with its state, or are refused: none is dropped in silence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from rewrite.errors import OptimizerError


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw", {"maximize": True}),
        ("adamw", {"amsgrad": True}),
        ("adam", {"amsgrad": True, "maximize": True}),
        ("sgd", {"momentum": 0.9, "nesterov": True}),
        ("sgd", {"momentum": 0.9, "dampening": 0.5}),
        ("sgd", {"maximize": True}),
    ],
)
def test_options_that_change_a_step_go_over(name: str, options: dict[str, Any]) -> None:
    model = layers()
    make = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[name]
    theirs = make(model.parameters(), lr=1e-2, weight_decay=0.0, **options)
    train(model, theirs)
    other = copy.deepcopy(model)
    ours = rewrite.optimizer(other, name, lr=1.0, weight_decay=0.0)
    ours.load_state_dict(rewrite.convert_optimizer_state(theirs.state_dict(), ours, other))
    train(model, theirs), train(other, ours)

    assert all(ours.param_groups[0][key] == value for key, value in options.items())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("options", "told"), [({"maximize": True}, "maximize=True"), ({"amsgrad": True}, "amsgrad=True")]
)
def test_options_that_8_bits_lack_are_refused(options: dict[str, Any], told: str) -> None:
    model = layers()
    theirs = torch.optim.AdamW(model.parameters(), **options)
    with pytest.raises(OptimizerError, match=f"it was made with {told}, which adamw8bit lacks\nNext: start anew"):
        rewrite.convert_optimizer_state(theirs.state_dict(), rewrite.optimizer(model, "adamw8bit", lr=1.0), model)


def grouped(model: nn.Module, rates: list[float], key: str = "lr") -> Any:
    """The state of AdamW over one group for each parameter."""
    named = zip(model.named_parameters(), rates, strict=True)
    optimizer = torch.optim.AdamW([{"params": [each], key: rate} for each, rate in named])
    train(model, optimizer)
    return optimizer.state_dict()


def test_parameters_that_had_several_learning_rates_are_refused() -> None:
    model = layers()
    for key, rates in (("lr", [1e-5, 1e-3, 1e-2, 1e-3]), ("eps", [1e-8, 1e-8, 1e-6, 1e-8])):
        state = grouped(model, rates, key)
        with pytest.raises(OptimizerError) as caught:
            rewrite.convert_optimizer_state(state, rewrite.optimizer(model, "adamw", lr=1.0))
        assert str(caught.value) == (
            f"optimizer state: {key} is {rates[0]} for some of its parameters and {rates[2]} for others, and this "
            f"optimizer has one group for them\n"
            f"Next: give the groups of the state (state['param_groups']) one {key}, or start anew"
        )


def test_each_group_takes_the_options_of_its_own_parameters() -> None:
    model = layers()
    state = grouped(model, [1e-5, 1e-3, 1e-5, 1e-3])  # weights and biases by turns
    ours = rewrite.optimizer(model, "adamw", lr=1.0)
    converted = rewrite.convert_optimizer_state(state, ours)

    assert [(group["lr"], group["param_names"]) for group in converted["param_groups"]] == [
        (1e-5, ["0.weight", "1.weight"]),
        (1e-3, ["0.bias", "1.bias"]),
    ]
    ours.load_state_dict(converted)
