"""A copy of the modules that shares everything else."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from rewrite.emit.tree import copy_tree


class Referring(nn.Module):
    """Refers to its own modules in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.again = self.linear
        self.hidden = [self.linear, (self.linear, {"deep": self.linear})]
        self.table = OrderedDict(first=self.linear)
        self.method = self.linear.forward
        self.mine = self.step
        self.outside = (nn.Linear(1, 1),)
        self.plain = {"a": [1]}

    def step(self) -> int:
        return id(self)


def test_references_lead_to_the_copy() -> None:
    model = Referring()
    copied = copy_tree(model)
    assert copied is not model
    assert copied.linear is not model.linear
    assert copied.linear is copied.again is copied.hidden[0] is copied.hidden[1][0] is copied.hidden[1][1]["deep"]
    assert copied.table["first"] is copied.method.__self__ is copied.linear
    assert type(copied.table) is OrderedDict
    assert copied.mine() == id(copied)
    assert copied.outside[0] is model.outside[0]


def test_parameters_buffers_and_values_are_shared_and_tables_are_not() -> None:
    model = Referring()
    model.register_buffer("count", torch.zeros(1))
    copied = copy_tree(model)
    assert copied.linear.weight is model.linear.weight
    assert copied.count is model.count
    assert copied.plain["a"] == model.plain["a"]
    copied.register_buffer("extra", torch.zeros(1))
    copied.plain["b"] = 1
    copied.linear.weight = nn.Parameter(torch.zeros(2, 2))
    copied.register_forward_hook(lambda *_: None)
    assert not hasattr(model, "extra")
    assert "b" not in model.plain
    assert model.linear.weight is not copied.linear.weight
    assert not model._forward_hooks


def test_cycles_between_modules_are_kept() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    vars(model[0])["parent"] = model
    vars(model[0])["others"] = [model[1]]
    copied = copy_tree(model)
    assert copied[0].parent is copied
    assert copied[0].others[0] is copied[1]
