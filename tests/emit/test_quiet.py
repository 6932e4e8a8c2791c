"""Blocks are looked up together where nothing changes them on the way, and one by one where something may."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint
from rewrite.emit.forward import RegionForward
from tests.recompute.models import WIDTH, hidden


class Scaled(nn.Module):
    """A block with an option."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.sine = False

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        inner = self.layer(value)
        return value + (inner.sin() if self.sine else inner.tanh())


class Blocks(nn.Module):
    """Three of them, with something between the first and the second."""

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor] = lambda _, value: value) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Scaled() for _ in range(3)])
        self.between = between

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        first, *others = self.blocks
        value = self.between(self, first(value))
        for block in others:
            value = block(value)
        return value.square().mean()


def rewritten(model: nn.Module, **options: Any) -> nn.Module:
    return rewrite.optimize(model, passes=[Checkpoint("blocks")], example_inputs=(hidden(),), **options)


def gradients(model: nn.Module, times: int = 3) -> list[torch.Tensor]:
    """Of some steps: the first makes code, the second looks, the third may find all as it was."""
    found = []
    for _ in range(times):
        model.zero_grad()
        model(hidden()).backward()
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return found


def assert_same(plain: nn.Module, small: nn.Module) -> None:
    for expected, found in zip(gradients(plain), gradients(small), strict=True):
        assert torch.equal(expected, found)


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The blocks that were looked up when they were called."""
    found: list[str] = []
    look = RegionForward.still_of_kind

    def noted(self: RegionForward, variant: Any) -> bool:
        found.append(self.path)
        return look(self, variant)

    monkeypatch.setattr(RegionForward, "still_of_kind", noted)
    return found


def test_plain_blocks_are_looked_up_together(one_by_one: list[str]) -> None:
    plain = Blocks()
    small = rewritten(plain)
    gradients(small, 2)
    one_by_one.clear()
    assert_same(plain, small)
    assert one_by_one == []


@pytest.mark.parametrize("where", ["blocks.0", "blocks.0.layer", "blocks.1", ""])
@pytest.mark.parametrize("first", ["hook", "rewrite"])
def test_a_hook_may_change_the_next_block(where: str, first: str) -> None:
    plain: Any = Blocks()
    small: Any = None if first == "hook" else rewritten(plain)
    if small is None:
        plain.get_submodule(where).register_forward_pre_hook(nothing)
        small = rewritten(plain)
    gradients(small)
    for model in (plain, small):

        def turn(*_: Any, model: Any = model) -> None:
            model.blocks[2].sine = not model.blocks[2].sine

        model.get_submodule(where).register_forward_pre_hook(turn)
    assert_same(plain, small)


def nothing(*_: Any) -> None:
    """A hook."""


@pytest.fixture
def heard() -> Iterator[list[nn.Module]]:
    """Models in which the call of a first block turns the option of the third."""
    models: list[Any] = []

    def turn(module: nn.Module, *_: Any) -> None:
        for model in models:
            if module is model.blocks[0]:
                model.blocks[2].sine = not model.blocks[2].sine

    handle = nn.modules.module.register_module_forward_hook(turn)
    yield models
    handle.remove()


def test_a_hook_on_all_modules_may_change_the_next_block(heard: list[nn.Module]) -> None:
    plain = Blocks()
    small = rewritten(plain)
    heard += [plain, small]
    assert_same(plain, small)


class Turning(nn.Module):
    """Has no graph, and turns the option of another block: held in a list, it is none of its own."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.others = [block]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        (block,) = self.others
        block.sine = not block.sine
        return value * float(value.detach().sum() < 1e9)


def test_a_module_without_a_graph_may_change_the_next_block() -> None:
    plain = Blocks(lambda model, value: model.turning(value))
    plain.turning = Turning(plain.blocks[2])
    small: Any = rewritten(plain, opaque=["turning"])
    small.turning.others[0] = small.blocks[2]
    small.blocks[2].sine = plain.blocks[2].sine = False
    assert_same(plain, small)


class Sine(torch.autograd.Function):
    """A function of the user's own, with a side effect."""

    turned: list[Any]

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        for block in Sine.turned:
            block.sine = not block.sine
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def test_a_function_of_the_users_may_change_the_next_block() -> None:
    Sine.turned = []
    plain = Blocks(lambda _, value: Sine.apply(value))
    small: Any = rewritten(plain)
    for model in (plain, small):
        Sine.turned = [model.blocks[2]]
        model.found = gradients(model)
    for expected, found in zip(plain.found, small.found, strict=True):
        assert torch.equal(expected, found)


class Wrapped:
    """A forward that turns the option of a block, and runs what it stands for."""

    def __init__(self, given: Callable[..., Any], block: Any) -> None:
        self.given, self.block = given, block

    def __call__(self, *args: Any) -> Any:
        self.block.sine = not self.block.sine
        return self.given(*args)


@pytest.mark.parametrize("where", ["blocks.1", "layer"])
def test_a_forward_that_somebody_wrapped_may_change_the_next_block(where: str) -> None:
    plain: Any = Blocks(lambda model, value: model.layer(value))
    plain.layer = nn.Linear(WIDTH, WIDTH)
    small: Any = rewritten(plain)
    gradients(small)
    for model in (plain, small):
        module = model.get_submodule(where)
        module.forward = Wrapped(module.forward, model.blocks[2])
    assert_same(plain, small)


def test_a_function_that_a_layer_of_torchs_was_given_may_change_the_next_block() -> None:
    turned: list[Any] = []

    def activation(value: torch.Tensor) -> torch.Tensor:
        for block in turned:
            block.sine = not block.sine
        return value.relu()

    plain: Any = Blocks(lambda model, value: model.layer(value))
    plain.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, activation=activation)
    small: Any = rewritten(plain)
    found = []
    for model in (plain, small):
        turned[:] = [model.blocks[2]]
        found.append(gradients(model))
    for expected, got in zip(*found, strict=True):
        assert torch.equal(expected, got)


@torch.library.custom_op("rewrite_tests::turned", mutates_args=())
def turned(value: torch.Tensor) -> torch.Tensor:
    """An operator of the user's, in Python."""
    for block in Sine.turned:
        block.sine = not block.sine
    return value.clone()


turned.register_fake(torch.empty_like)
turned.register_autograd(lambda ctx, grad: grad)


def test_an_operator_of_the_users_may_change_the_next_block() -> None:
    Sine.turned = []
    plain: Any = Blocks(lambda _, value: turned(value))
    small: Any = rewritten(plain)
    found = []
    for model in (plain, small):
        Sine.turned = [model.blocks[2]]
        found.append(gradients(model))
    for expected, got in zip(*found, strict=True):
        assert torch.equal(expected, got)


def test_hooks_on_saved_tensors_may_change_the_next_block() -> None:
    plain: Any = Blocks(lambda _, value: value.sin())
    small: Any = rewritten(plain)
    gradients(small)
    found = []
    for model in (plain, small):

        def pack(tensor: torch.Tensor, model: Any = model) -> torch.Tensor:
            model.blocks[2].sine = True
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found.append(gradients(model, 1))
    for expected, got in zip(*found, strict=True):
        assert torch.equal(expected, got)


class Paused(torch.autograd.Function):
    """The value as it is; something else happens first."""

    work: list[Callable[[], Any]]

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        if Paused.work:
            Paused.work.pop()()
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Graded(Scaled):
    """A block that computes something else without gradients."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        inner = self.layer(value)
        return value + (inner.tanh() if torch.is_grad_enabled() else inner.sin())


def test_another_thread_may_call_the_model_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last that its blocks are looked up for is then another call, without gradients, which has not ended."""
    monkeypatch.setattr("rewrite.emit.quiet._home", lambda _: "torch")  # as where another thread comes at its own time
    Paused.work = []
    plain: Any = Blocks(lambda _, value: Paused.apply(value))
    plain.blocks = nn.ModuleList([Graded() for _ in range(3)])
    small: Any = rewritten(plain)
    there, go_on = threading.Event(), threading.Event()

    def infer() -> None:
        with torch.no_grad():
            small(hidden())

    thread = threading.Thread(target=infer)
    infer()
    infer()
    gradients(small)
    expected = gradients(plain, 1)
    Paused.work = [lambda: (there.set(), go_on.wait(10)), lambda: (thread.start(), there.wait(10))]
    try:
        found = gradients(small, 1)
    finally:
        go_on.set()
        thread.join(10)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    assert Paused.work == []


@pytest.mark.parametrize("change", ["mode", "frozen", "layer", "option"])
def test_what_changed_between_calls_is_seen(change: str) -> None:
    plain: Any = Blocks()
    small: Any = rewritten(plain)
    gradients(small)
    for model in (plain, small):
        block = model.blocks[1]
        if change == "mode":
            model.eval()
        elif change == "frozen":
            block.layer.weight.requires_grad_(False)
        elif change == "layer":
            torch.manual_seed(5)
            block.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        else:
            block.sine = True
    assert_same(plain, small)
