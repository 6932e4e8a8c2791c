"""A state goes into an optimizer of its own kind, and of the same parameters; anything else is told at load."""

from __future__ import annotations

import copy
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint, ChunkFFN
from rewrite.errors import OptimizerError
from tests.optim.models import batch, bert, train

State = dict[str, Any]


def state_of(name: str, **options: Any) -> State:
    """After two steps."""
    model = bert()
    optimizer = rewrite.optimizer(model, name, lr=1e-3, **options)
    train(model, optimizer, range(2))
    return optimizer.state_dict()


def stock_state(make: Any) -> State:
    model = bert()
    optimizer = make(model)
    train(model, optimizer, range(2))
    found: State = optimizer.state_dict()
    return found


@pytest.mark.parametrize(
    ("saved", "loading", "theirs", "ours"),
    [
        ("adamw", "adamw8bit", r"adamw \(torch, 32 bits: exp_avg, exp_avg_sq\)", r"adamw8bit \(bitsandbytes, 8 bits"),
        ("adamw8bit", "adamw", r"adamw8bit \(bitsandbytes, 8 bits: state1, state2\)", r"adamw \(torch, 32 bits"),
        ("lion8bit", "adam8bit", r"lion8bit \(bitsandbytes, 8 bits: state1\)", r"adam8bit \(bits"),
        ("lion8bit", "lion", r"lion8bit \(", r"lion \(bitsandbytes, 32 bits: state1\)"),
        ("adam", "adamw", r"adam \(torch", r"adamw \(torch"),
        ("sgd8bit", "sgd", r"sgd8bit \(", r"sgd \(torch, 32 bits: momentum_buffer\)"),
    ],
)
def test_a_state_of_another_kind_names_both(saved: str, loading: str, theirs: str, ours: str) -> None:
    model = bert()
    optimizer = rewrite.optimizer(model, loading, lr=1e-3)
    with pytest.raises(OptimizerError, match=f"it is of {theirs}.*, and this optimizer is {ours}.*\nNext: load rew"):
        optimizer.load_state_dict(state_of(saved))
    assert not optimizer.state


@pytest.mark.parametrize(
    ("make", "loading", "theirs"),
    [
        (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3), "adamw8bit", r"adamw \(torch"),
        (lambda model: torch.optim.Adam(model.parameters(), lr=1e-3), "adamw8bit", r"adam \(torch"),
        (lambda model: bnb.optim.AdamW8bit(model.parameters(), lr=1e-3), "adamw", r"adamw8bit or adam8bit \(bits"),
        (lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), "sgd8bit", r"sgd \(torch"),
        (lambda model: torch.optim.Adagrad(model.parameters()), "adamw", r"not known here \(step, sum\)"),
    ],
)
def test_states_of_stock_optimizers_are_known(make: Any, loading: str, theirs: str) -> None:
    optimizer = rewrite.optimizer(bert(), loading, lr=1e-3)
    with pytest.raises(OptimizerError, match=f"{theirs}.*this optimizer is {loading}"):
        optimizer.load_state_dict(stock_state(make))


def test_a_state_of_other_groups() -> None:
    state = stock_state(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
    optimizer = rewrite.optimizer(bert(), "adamw", lr=1e-3)
    with pytest.raises(OptimizerError, match=r"hold 41 parameters, and this optimizer's hold 17 \+ 24"):
        optimizer.load_state_dict(state)


def test_a_state_of_other_parameters() -> None:
    state = state_of("adamw")
    state["param_groups"][0]["param_names"] = list(reversed(state["param_groups"][0]["param_names"]))
    optimizer = rewrite.optimizer(bert(), "adamw", lr=1e-3)
    with pytest.raises(OptimizerError, match=r"holds 'classifier.weight' in the place where .* 'bert.embeddings.word"):
        optimizer.load_state_dict(state)


def test_a_state_of_other_shapes() -> None:
    state = state_of("adamw")
    state["state"][0]["exp_avg"] = torch.zeros(3, 3)
    optimizer = rewrite.optimizer(bert(), "adamw", lr=1e-3)
    with pytest.raises(OptimizerError, match=r"exp_avg has the shape \(3, 3\), and the parameter \(200, 64\)"):
        optimizer.load_state_dict(state)


def test_a_state_of_other_widths() -> None:
    optimizer = rewrite.optimizer(bert(), "adamw8bit", lr=1e-3)
    with pytest.raises(OptimizerError, match=r"word_embeddings.weight: its state1 is kept in 8 bits, .* it in 32"):
        optimizer.load_state_dict(state_of("adamw8bit", embedding_bits=8))


def test_names_may_have_the_prefix_of_a_wrapper() -> None:
    state = state_of("adamw8bit")
    for group in state["param_groups"]:
        group["param_names"] = [f"module.{name}" for name in group["param_names"]]
    optimizer = rewrite.optimizer(bert(), "adamw8bit", lr=1e-3)
    optimizer.load_state_dict(state)

    assert optimizer.param_groups[0]["param_names"][0] == "bert.embeddings.word_embeddings.weight"


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "lion8bit", "sgd8bit"])
def test_a_state_saved_before_a_rewrite_loads_after_it(name: str) -> None:
    model = bert()
    optimizer = rewrite.optimizer(model, name, lr=1e-3)
    train(model, optimizer, range(3))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = train(model, optimizer, range(3, 6))

    fresh = bert()
    fresh.load_state_dict(weights)
    small = rewrite.optimize(fresh, passes=[Checkpoint()], example_inputs=batch())
    resumed = rewrite.optimizer(small, name, lr=1.0)
    resumed.load_state_dict(state)
    assert train(small, resumed, range(3, 6)) == expected


def test_torchs_own_optimizer_over_the_original_resumes_on_the_rewritten() -> None:
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, range(3))
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = train(model, optimizer, range(3, 6))

    fresh = bert()
    fresh.load_state_dict(weights)
    small = rewrite.optimize(fresh, passes=[ChunkFFN(chunks=2)], example_inputs=batch())
    own = torch.optim.AdamW(small.parameters(), lr=1.0)
    own.load_state_dict(copy.deepcopy(state))  # torch goes on with the tensors it is given
    fresh.load_state_dict(weights)
    losses = train(small, own, range(3, 6))
    assert losses == pytest.approx(expected, rel=1e-5)

    fresh.load_state_dict(weights)
    ours = rewrite.optimizer(rewrite.optimize(fresh, passes=[Checkpoint()], example_inputs=batch()), "adamw", lr=1.0)
    for group in ours.param_groups:
        group["weight_decay"] = 0.01
    ours.load_state_dict(rewrite.convert_optimizer_state(state, ours, fresh))
    assert train(fresh, ours, range(3, 6)) == expected


def test_a_stock_state_in_the_same_groups_loads() -> None:
    model = nn.Linear(80, 64, bias=False)
    theirs = bnb.optim.AdamW8bit(model.parameters(), lr=1e-3)
    model(torch.ones(2, 80)).sum().backward()
    theirs.step()
    ours = rewrite.optimizer(model, "adamw8bit", lr=1.0)
    ours.load_state_dict(theirs.state_dict())

    assert torch.equal(ours.state[model.weight]["state1"], theirs.state[model.weight]["state1"])
    assert ours.param_groups[0]["kind"] == "adamw8bit"
    assert ours.param_groups[0]["lr"] == 1e-3
    ours.step()
