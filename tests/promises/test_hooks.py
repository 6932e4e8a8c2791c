"""Hooks fire as often, and with what they fire in the untouched model, wherever and whenever they are registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint
from tests.promises.pairs import blocks, names, pair, policies
from tests.zoo import ZOO
from tests.zoo.compare import assert_equal, run

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # as in the plain model
KINDS = ("forward", "forward pre", "forward kwargs", "full backward", "full backward pre")
PLACES = ("block", "leaf", "middle", "root")


def register(module: nn.Module, kind: str, calls: list[Any]) -> Any:
    """Record each call of a hook of this kind, with a number that depends on what it was given."""

    def note(*given: Any, **_: Any) -> None:
        calls.append([float(t.detach().sum()) for item in given for t in _tensors(item)])

    if kind == "forward":
        return module.register_forward_hook(lambda _, args, output: note(args, output))
    if kind == "forward pre":
        return module.register_forward_pre_hook(lambda _, args: note(args))
    if kind == "forward kwargs":
        return module.register_forward_hook(lambda _, args, kwargs, out: note(args, out), with_kwargs=True)
    if kind == "full backward":
        return module.register_full_backward_hook(lambda _, grads_in, grads_out: note(grads_out))
    return module.register_full_backward_pre_hook(lambda _, grads_out: note(grads_out))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def place(model: nn.Module, where: str) -> nn.Module:
    """The module a hook goes on: a block, a leaf inside it, a container inside it, or the model."""
    block = blocks(model)[1]
    if where == "root":
        return model
    if where == "block":
        return block
    if where == "leaf":
        return next(module for module in block.modules() if isinstance(module, nn.Linear))
    return next((module for module in block.children() if list(module.children())), block)


@pytest.mark.thinned(63)
@names("plain-branching", sweep=("bert", "llama"))
@policies
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_registered_after_the_rewrite_fires_once(kind: str, where: str, policy: str, name: str) -> None:
    both = pair(name, policy)
    expected: list[Any] = []
    found: list[Any] = []
    register(place(both.plain, where), kind, expected)
    register(place(both.small, where), kind, found)
    assert_equal(run(both.plain, both.inputs), run(both.small, both.inputs))
    assert found == expected
    assert len(found) == 1 or (kind.startswith("full backward") and where == "root")


@pytest.mark.thinned(9)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_registered_before_the_rewrite_fires_once(kind: str, where: str) -> None:
    entry = ZOO["plain-branching"]
    inputs = entry.inputs(*entry.shapes[0], "padded")
    calls: list[Any] = []
    expected: list[Any] = []
    model, plain = entry.build(), entry.build()
    register(place(model, where), kind, calls)
    register(place(plain, where), kind, expected)
    small = rewrite.optimize(model, passes=[Checkpoint()], example_inputs=inputs)
    calls.clear()
    assert_equal(run(plain, inputs), run(small, inputs))
    assert calls == expected
    assert len(calls) == 1 or (kind.startswith("full backward") and where == "root")


@pytest.mark.thinned(3)
@policies
@pytest.mark.parametrize("where", PLACES[:3])
def test_a_hook_may_change_the_output(where: str, policy: str) -> None:
    both = pair("bert", policy)
    for model in (both.plain, both.small):
        place(model, where).register_forward_hook(lambda _, __, output: _scaled(output))
    assert_equal(run(both.plain, both.inputs), run(both.small, both.inputs))


def _scaled(output: Any) -> Any:
    return (output[0] * 1.5, *output[1:]) if isinstance(output, tuple) else output * 1.5


@policies
def test_a_removed_hook_is_gone(policy: str) -> None:
    both = pair("bert", policy)
    calls: list[Any] = []
    handles = [register(place(both.small, where), "forward", calls) for where in PLACES]
    run(both.small, both.inputs)
    assert len(calls) >= 3
    for handle in handles:
        handle.remove()
    calls.clear()
    assert_equal(run(both.plain, both.inputs), run(both.small, both.inputs))
    assert calls == []


@names("bert", "plain-branching", sweep=("llama",))
def test_parameter_hooks_fire_once(name: str) -> None:
    both = pair(name)
    calls: list[str] = []
    for path, parameter in both.small.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, path=path: calls.append(path))
    found = run(both.small, both.inputs)
    assert sorted(calls) == sorted(path for path, grad in found.grads.items() if grad is not None)
