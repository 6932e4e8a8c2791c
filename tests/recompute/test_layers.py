"""Where state lies is found once for a module, and anew when other modules, or more of it, are there."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rewrite.errors import RecomputeError
from rewrite.recompute.layers import Layers
from tests.recompute.models import NOTHING, WIDTH, assert_same, forward, hidden, stacks, step


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Layers]:
    """Those that were looked for."""
    every: list[Layers] = []
    look = Layers.__init__

    def noted(self: Layers, *given: Any) -> None:
        every.append(self)
        look(self, *given)

    monkeypatch.setattr(Layers, "__init__", noted)
    return every


def replace_layer(block: Any) -> None:
    block.up = nn.Linear(WIDTH, WIDTH)
    nn.init.constant_(block.up.weight, 0.1)
    nn.init.zeros_(block.up.bias)


def add_attribute(block: Any) -> None:
    block.up.rate = 2


def give_no_bias(block: Any) -> None:
    block.up.bias = None


def add_buffer(block: Any) -> None:
    block.up.register_buffer("seen", torch.zeros(2))


def assert_a_changed_bias_is_noticed(small: Any) -> None:
    loss = forward(small, hidden())
    with torch.no_grad():
        small.blocks[1].up.bias.add_(1.0)
    with pytest.raises(RecomputeError, match=r"'up\.bias' was changed in place"):
        loss.backward()


def test_they_are_found_once(found: list[Layers]) -> None:
    _, small = stacks(NOTHING)
    for _ in range(3):
        step(small, hidden())
    assert len(found) == len(small.blocks)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [replace_layer, add_attribute, add_buffer])
def test_they_are_found_anew_where_others_are(change: Callable[[Any], None], found: list[Layers]) -> None:
    plain, small = stacks(NOTHING)
    step(small, hidden())
    step(small, hidden())
    found.clear()
    for model in (plain, small):
        change(model.blocks[1])  # type: ignore[index]
    assert_same(step(plain, hidden()), step(small, hidden()))
    assert len(found) >= 1
    found.clear()
    assert_same(step(plain, hidden()), step(small, hidden()))
    assert found == []


@pytest.mark.parametrize("change", [replace_layer, give_no_bias])
def test_a_change_between_forward_and_backward_is_noticed_in_what_is_remembered(change: Callable[[Any], None]) -> None:
    _, small = stacks(NOTHING)
    for _ in range(2):
        step(small, hidden())
    loss = forward(small, hidden())
    change(small.blocks[1])  # type: ignore[index]
    with pytest.raises(RecomputeError, match="was replaced between"):
        loss.backward()


def test_a_bias_that_came_back_is_looked_after() -> None:
    plain, small = stacks(NOTHING)
    for model in (plain, small):
        model.blocks[1].up.bias = None  # type: ignore[union-attr, index]
    for _ in range(2):
        assert_same(step(plain, hidden()), step(small, hidden()))
    for model in (plain, small):
        model.blocks[1].up.bias = nn.Parameter(torch.full((WIDTH,), 0.5))  # type: ignore[union-attr, index]
    assert_same(step(plain, hidden()), step(small, hidden()))
    assert_a_changed_bias_is_noticed(small)


def test_what_is_remembered_goes_with_the_model() -> None:
    def copied() -> list[weakref.ref[Any]]:
        _, small = stacks(NOTHING)
        step(small, hidden())
        other = copy.deepcopy(small)
        step(other, hidden())
        return [weakref.ref(module) for model in (small, other) for module in model.modules()]

    refs = copied()
    gc.collect()
    assert [ref for ref in refs if ref() is not None] == []


def test_a_copy_looks_for_its_own() -> None:
    plain, small = stacks(NOTHING)
    step(small, hidden())
    other = copy.deepcopy(small)
    with torch.no_grad():
        for model in (plain, other):
            model.blocks[1].up.weight.mul_(2.0)  # type: ignore[union-attr, index, operator]
    assert_same(step(plain, hidden()), step(other, hidden()))


class Called(nn.Linear):
    """A layer whose call is more than its forward."""

    def __call__(self, value: torch.Tensor) -> Any:
        return super().__call__(value) * 3


@pytest.mark.parametrize("kind", [nn.Linear, Called])
def test_a_layer_runs_again_as_it_ran(kind: type[nn.Linear]) -> None:
    def body(block: Any, value: torch.Tensor) -> torch.Tensor:
        return value + block.down(torch.tanh(block.layer(value)))

    plain, small = stacks(NOTHING, body, layer=lambda: kind(WIDTH, WIDTH))
    assert_same(step(plain, hidden()), step(small, hidden()))


@pytest.mark.parametrize("kind", ["forward", "pre"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_on_all_modules_has_its_part_in_the_recompute(kind: str, when: str) -> None:
    def scale(module: nn.Module, given: Any, result: Any = None) -> Any:
        if isinstance(module, nn.Linear):
            return result * 2 if result is not None else tuple(each * 2 for each in given)
        return None

    register = {
        "forward": nn.modules.module.register_module_forward_hook,
        "pre": nn.modules.module.register_module_forward_pre_hook,
    }[kind]
    handle = register(scale) if when == "before" else None
    try:
        plain, small = stacks(NOTHING)
        step(small, hidden())
        handle = handle or register(scale)
        for _ in range(3):
            assert_same(step(plain, hidden()), step(small, hidden()))
    finally:
        if handle is not None:
            handle.remove()


def test_a_layer_whose_call_was_replaced_runs_again_by_it() -> None:
    """As `layer.compile()` does, with results of its own."""
    plain, small = stacks(NOTHING)
    step(small, hidden())
    for model in (plain, small):
        layer = model.blocks[1].up  # type: ignore[index]
        layer._compiled_call_impl = lambda value, layer=layer: layer.forward(value) * 3
    for _ in range(3):
        assert_same(step(plain, hidden()), step(small, hidden()))


def restored(layer: nn.Module) -> None:
    layer.__setstate__(copy.deepcopy(layer.__dict__))


def with_other_tables(layer: nn.Module) -> None:
    layer._parameters = dict(layer._parameters)


def with_another_dict(layer: nn.Module) -> None:
    layer.__dict__ = dict(layer.__dict__)


@pytest.mark.parametrize("change", [restored, with_other_tables, with_another_dict])
def test_tables_that_were_replaced_are_looked_for_anew(change: Callable[[nn.Module], None]) -> None:
    plain, small = stacks(NOTHING)
    for _ in range(2):
        step(small, hidden())
    for model in (plain, small):
        change(model.blocks[1].up)  # type: ignore[index]
    assert_same(step(plain, hidden()), step(small, hidden()))
    assert_a_changed_bias_is_noticed(small)
