"""What thaws while a model trains comes into its optimizer: what ran goes on, what is new starts anew."""

from __future__ import annotations

import copy

import pytest
import torch

import rewrite
from rewrite.errors import OptimizerError
from tests.optim.models import bert, moments_bits, train

NAMES = pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
LAYER = "bert.encoder.layer.0"


def partly_frozen(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """After two steps with the embeddings and the first layer frozen."""
    model = bert()
    rewrite.freeze(model, "embeddings", "encoder.layer.0")
    optimizer = rewrite.optimizer(model, name, lr=1e-3)
    train(model, optimizer, range(2))
    return model, optimizer


def moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The first moment of each parameter that has one, by name."""
    return {
        name: next(value for key, value in optimizer.state[parameter].items() if key in ("exp_avg", "state1")).clone()
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        if optimizer.state.get(parameter)
    }


@NAMES
def test_thawed_parameters_start_anew_in_an_optimizer_of_their_own(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = partly_frozen(name)
    before = moments(optimizer)
    model.bert.encoder.layer[0].requires_grad_(True)
    larger = rewrite.optimizer(model, name, lr=1.0)
    larger.load_state_dict(rewrite.convert_optimizer_state(optimizer.state_dict(), larger))

    found = moments(larger)
    assert found.keys() == before.keys()
    assert all(torch.equal(found[each], before[each]) for each in before)
    assert [group["lr"] for group in larger.param_groups] == [1e-3, 1e-3]
    told = f"optimizer state: 16 parameters that it does not hold start anew, {LAYER}.attention.self.query.weight first"
    assert capsys.readouterr().err == f"{told}\n"
    train(model, larger, range(2, 3))
    assert f"{LAYER}.output.dense.weight" in moments(larger)


@NAMES
def test_thawed_parameters_come_in_as_a_group(name: str) -> None:
    model, optimizer = partly_frozen(name)
    running = copy.deepcopy(moments(optimizer))
    thawed = [model.bert.embeddings, model.bert.encoder.layer[0]]
    for module, path in zip(thawed, ("bert.embeddings", LAYER), strict=True):
        module.requires_grad_(True)
        optimizer.add_param_group({"params": list(module.named_parameters(path))})
    assert all(torch.equal(moments(optimizer)[each], running[each]) for each in running)
    expected = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(2, 4))

    bits = moments_bits(optimizer)
    assert bits["bert.embeddings.word_embeddings.weight"] == 32
    assert bits[f"{LAYER}.output.dense.weight"] == (8 if name == "adamw8bit" else 32)
    optimizer.load_state_dict(optimizer.state_dict())
    other, its = expected
    train(other, its, range(2, 4))
    assert moments_bits(its) == bits
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_state_of_another_model_is_refused() -> None:
    _, optimizer = partly_frozen("adamw")
    other = torch.nn.Linear(4, 4)
    with pytest.raises(
        OptimizerError, match=r"none of this optimizer's parameters: 'bert.*', and not 'weight'\nNext: g"
    ):
        rewrite.convert_optimizer_state(optimizer.state_dict(), rewrite.optimizer(other, "adamw", lr=1.0))


def test_names_are_compared_by_whole_components() -> None:
    def one_trained(place: int) -> torch.optim.Optimizer:
        model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(12))).requires_grad_(False)
        model[place].requires_grad_(True)
        optimizer = rewrite.optimizer(model, "adamw", lr=1.0)
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        return optimizer

    first, last = one_trained(1), one_trained(11)
    with pytest.raises(OptimizerError, match=r"it holds '1\.weight' in the place where this optimizer holds '11\.weig"):
        last.load_state_dict(first.state_dict())
