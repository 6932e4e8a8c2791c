"""Frozen modules held in eval mode through `train()`: which, for how long, and what the model then computes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import rewrite
from passes import Checkpoint, DetachFrozen
from tests.passes.models import tokens
from tests.passes.test_detach_frozen import small_model
from tests.zoo.compare import assert_equal, run


class Drops(nn.Module):
    """A layer, then dropout called as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.linear(x), 0.5, self.training)


class Net(nn.Module):
    """A frozen part with a batch norm and dropout, then trained layers around a frozen batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), Drops())
        self.middle, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.before.requires_grad_(False)
        self.norm.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.middle(self.before(x)))).tanh().sum()


def in_eval(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if not module.training}


HELD = {"before", "norm", *(f"before.{index}" for index in range(5)), "before.4.linear"}


def held_net() -> tuple[Net, Net, dict[str, torch.Tensor]]:
    model, inputs = Net(), {"x": torch.randn(6, 8)}
    return model, rewrite.optimize(model, [DetachFrozen(eval_mode=True)], example_inputs=inputs), inputs


def test_the_frozen_part_and_frozen_norms_are_held() -> None:
    model, small, _ = held_net()
    assert in_eval(small.train()) == HELD
    assert in_eval(small.train().eval().train()) == HELD
    assert in_eval(small.eval()) == {path for path, _ in small.named_modules()}
    assert in_eval(model) == set()
    summaries = [change.summary for change in rewrite.report(small).changes]
    assert "held in eval mode through train(): before, norm" in summaries


def test_it_computes_what_the_model_with_them_in_eval_mode_does() -> None:
    model, small, inputs = held_net()
    assert rewrite.verify(model, small, inputs).passed
    assert in_eval(model) == set()
    by_hand = copy.deepcopy(model)
    by_hand.before.eval()
    by_hand.norm.eval()
    small.train()
    for each in (by_hand, small):
        torch.manual_seed(3)
        each(**inputs).backward()
    assert torch.equal(by_hand.middle.weight.grad, small.middle.weight.grad)
    assert small.before[1].num_batches_tracked.item() == small.norm.num_batches_tracked.item() == 0


def test_what_is_thawed_goes_back_to_the_mode_that_was_asked_for() -> None:
    _, small, inputs = held_net()
    small.train()
    small.norm.requires_grad_(True)
    small(**inputs)
    assert in_eval(small) == HELD - {"norm"}
    assert small.norm.num_batches_tracked.item() == 1
    small.eval()
    small.before.requires_grad_(True)
    small(**inputs)
    assert in_eval(small) == {path for path, _ in small.named_modules()}
    assert in_eval(small.train()) == set()


@pytest.mark.sweep
def test_blocks_are_held_one_by_one() -> None:
    model = small_model().train()
    small = rewrite.optimize(model, [DetachFrozen(eval_mode=True), Checkpoint()], example_inputs=tokens())
    assert {path for path in in_eval(small.train()) if path.count(".") < 2} == {"embedding", "layers.0", "layers.1"}
    by_hand = copy.deepcopy(model)
    for module in (by_hand.embedding, *by_hand.layers[:2]):
        vars(module)["train"] = lambda mode=True, module=module: type(module).train(module, False)
    assert_equal(run(by_hand, {"tokens": tokens()}), run(small, {"tokens": tokens()}))
    small.layers[1].requires_grad_(True)
    small(tokens()).backward()
    assert {path for path in in_eval(small) if path.count(".") < 2} == {"embedding", "layers.0"}
    assert small.layers[1].norm.weight.grad.abs().sum() > 0


@pytest.mark.thinned(2)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_holds_its_own(copied: Any) -> None:
    _, small, inputs = held_net()
    other = copied(small)
    assert in_eval(other.train()) == HELD
    assert other.before.train() is other.before
    other(**inputs)
    assert in_eval(other) == HELD
    rewrite.remove(other)
    assert in_eval(other) == set()
    assert in_eval(small.train()) == HELD


def test_a_failed_optimize_in_place_releases_them() -> None:
    model, inputs = Net(), {"x": torch.randn(6, 8)}
    with pytest.raises(rewrite.SelectorError):
        rewrite.optimize(
            model, "detach-frozen{eval_mode=true},checkpoint{select=no}", example_inputs=inputs, inplace=True
        )
    assert in_eval(model) == set()
    assert "train" not in vars(model.before)
