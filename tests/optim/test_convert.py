"""A state of one kind becomes one of another, moment by moment."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import rewrite
from rewrite.errors import OptimizerError
from tests.optim.models import bert, moments_bits, train

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "adamw8bit": ("state1", "state2")}


def trained(name: str, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = bert()
    optimizer = rewrite.optimizer(model, name, lr=1e-3, **options)
    train(model, optimizer, range(3))
    return model, optimizer


def test_into_8_bits_and_back_is_within_the_quantization() -> None:
    model, optimizer = trained("adamw")
    small = rewrite.optimizer(model, "adamw8bit", lr=1.0)
    small.load_state_dict(rewrite.convert_optimizer_state(optimizer.state_dict(), small))
    back = rewrite.optimizer(model, "adamw", lr=1.0)
    back.load_state_dict(rewrite.convert_optimizer_state(small.state_dict(), back))
    bits = moments_bits(small)

    assert set(bits.values()) == {8, 32}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for key in MOMENTS["adamw"]:
                expected, found = optimizer.state[parameter][key], back.state[parameter][key]
                if bits[name] == 32:
                    assert torch.equal(expected, found)
                else:
                    gap = (expected - found).abs().max() / expected.abs().max()
                    assert 0 < gap < 0.02, (name, key)
            assert float(back.state[parameter]["step"]) == 3.0
    assert [group["lr"] for group in back.param_groups] == [1e-3, 1e-3]
    assert [group["weight_decay"] for group in back.param_groups] == [0.01, 0.0]


def test_a_converted_run_goes_on_as_it_was() -> None:
    model, optimizer = trained("adamw")
    other = copy.deepcopy(model)
    small = rewrite.optimizer(other, "adamw8bit", lr=1.0)
    small.load_state_dict(rewrite.convert_optimizer_state(optimizer.state_dict(), small))

    assert train(other, small, range(3, 8)) == pytest.approx(train(model, optimizer, range(3, 8)), rel=0.01)


@pytest.mark.parametrize(("one", "other"), [("lion", "lion8bit"), ("sgd", "sgd8bit"), ("adam8bit", "adamw")])
def test_within_a_family(one: str, other: str) -> None:
    model, optimizer = trained(one, **({"momentum": 0.8} if one == "sgd" else {}))
    target = rewrite.optimizer(model, other, lr=1.0)
    target.load_state_dict(rewrite.convert_optimizer_state(optimizer.state_dict(), target))
    back = rewrite.optimizer(model, one, lr=1.0)
    back.load_state_dict(rewrite.convert_optimizer_state(target.state_dict(), back))

    assert len(target.state) == len(optimizer.state)
    for parameter, entry in optimizer.state.items():
        key = next(key for key in ("state1", "momentum_buffer") if key in entry)
        found = back.state[parameter][key]
        if found.dtype == torch.uint8:
            assert (found.int() - entry[key].int()).abs().max() <= 1
        else:
            assert torch.allclose(found, entry[key], atol=0.02 * float(entry[key].abs().max()))
    if one == "sgd":
        assert target.param_groups[0]["betas"] == (0.8, 0.0)
        assert back.param_groups[0]["momentum"] == 0.8
    train(model, target, range(3, 4))


def test_moments_follow_names_when_the_order_is_another() -> None:
    model, optimizer = trained("adamw")
    state = optimizer.state_dict()
    group = state["param_groups"][0]
    group["param_names"] = list(reversed(group["param_names"]))
    group["params"] = list(reversed(group["params"]))
    target = rewrite.optimizer(model, "adamw", lr=1.0)
    target.load_state_dict(rewrite.convert_optimizer_state(state, target))

    for parameter in model.parameters():
        assert torch.equal(target.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_moments_follow_the_models_order_through_one_group_and_frozen_parameters() -> None:
    model = bert()
    model.bert.embeddings.requires_grad_(False)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, theirs, range(2))
    ours = rewrite.optimizer(model, "adamw8bit", lr=1.0, keep_fp32=["bert", "classifier"])
    ours.load_state_dict(rewrite.convert_optimizer_state(theirs.state_dict(), ours, model))

    assert len(ours.state) == sum(parameter.requires_grad for parameter in model.parameters())
    for parameter, entry in ours.state.items():
        assert torch.equal(entry["state1"], theirs.state[parameter]["exp_avg"])
        assert entry["step"] == 2


def test_what_cannot_be_converted_is_told() -> None:
    model, optimizer = trained("lion8bit")
    target = rewrite.optimizer(model, "adamw", lr=1e-3)
    with pytest.raises(OptimizerError, match=r"lion8bit \(.*\), whose moments mean nothing to adamw .*\nNext: start"):
        rewrite.convert_optimizer_state(optimizer.state_dict(), target)
    plain = torch.optim.AdamW(model.parameters())
    with pytest.raises(OptimizerError, match=r"AdamW was not made by rewrite\.optimizer"):
        rewrite.convert_optimizer_state(optimizer.state_dict(), plain)
    train(model, plain, range(1))
    with pytest.raises(OptimizerError, match=r"names no parameters, and its 1 groups are not the optimizer's\nNext: g"):
        rewrite.convert_optimizer_state(plain.state_dict(), target)
    model.bert.embeddings.requires_grad_(False)
    with pytest.raises(OptimizerError, match=r"it is of 41 parameters; the model has 40, of which 35 train"):
        rewrite.convert_optimizer_state(plain.state_dict(), target, _without_a_parameter(model))
    nesterov = torch.optim.SGD(bert().named_parameters(), lr=0.1, momentum=0.9, nesterov=True)
    with pytest.raises(OptimizerError, match="it was made with nesterov=True, which sgd8bit lacks"):
        rewrite.convert_optimizer_state(nesterov.state_dict(), rewrite.optimizer(bert(), "sgd8bit", lr=0.1))


def _without_a_parameter(model: torch.nn.Module) -> torch.nn.Module:
    model.classifier.bias = None
    return model
