"""What a graph cannot hold, and what is changed after the rewrite: the numbers stay those of the untouched model."""

from __future__ import annotations

import copy
import functools
import gc
import types
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import rewrite
from passes import Checkpoint

SPECS = ["", "checkpoint", "checkpoint{policy=sqrt}"]


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class Stack(nn.Module):
    """Three blocks of a class after a layer."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(8, 8)
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.sum()


def hidden(batch: int = 3, length: int = 5) -> torch.Tensor:
    return torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(batch))


def assert_same_steps(model: nn.Module, small: nn.Module) -> None:
    """Two steps of plain gradient descent on each of two batches, bit for bit, random numbers included."""
    for batch in (hidden(), hidden(), hidden(2, 7), hidden(2, 7)):
        left = []
        for module in (model, small):
            module.zero_grad()
            torch.manual_seed(1)
            loss = module(batch)
            loss.backward()
            left.append([loss, *[p.grad for p in module.parameters()], torch.get_rng_state()])
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.05 * parameter.grad
        assert all(torch.equal(one, other) for one, other in zip(*left, strict=True))


class SpansAutocast(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return hidden + torch.tanh(self.linear(hidden)).float()


class ReentrantCheckpoint(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + checkpoint(lambda value: torch.tanh(self.linear(value)), hidden, use_reentrant=True)


class CallsModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, value, weight):  # type: ignore[no-untyped-def, override]
        ctx.save_for_backward(value, weight)
        return module(value)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def, override]
        value, weight = ctx.saved_tensors
        return None, gradient @ weight, gradient.flatten(0, 1).T @ value.flatten(0, 1)


class HandsOutItsModule(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + CallsModule.apply(self.linear, hidden, self.linear.weight) + self.linear.bias


class SetsTheSeed(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return hidden + functional.dropout(torch.tanh(self.linear(hidden)), 0.5)


class ForksTheSeed(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            noise = torch.rand_like(hidden)
        return hidden + torch.tanh(self.linear(hidden)) * noise


class PicksAnAttentionKernel(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return hidden + functional.scaled_dot_product_attention(self.linear(hidden), hidden, hidden)


class PacksSavedTensors(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 1.5, lambda tensor: tensor):
            return hidden + torch.tanh(self.linear(hidden)) * 2


class DividesByNumpy(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.linear(hidden) / numpy.sqrt(8)


class OldSpectralNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.utils.spectral_norm(nn.Linear(8, 8))


BLOCKS = [
    SpansAutocast, ReentrantCheckpoint, HandsOutItsModule, SetsTheSeed, ForksTheSeed, PicksAnAttentionKernel,
    PacksSavedTensors, DividesByNumpy, OldSpectralNorm,
]  # fmt: skip


@pytest.mark.thinned(28)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_that_do_more_than_call_torch(block: type[nn.Module], spec: str) -> None:
    model = Stack(block)
    small = rewrite.optimize(copy.deepcopy(model), spec, example_inputs=(hidden(),))

    assert_same_steps(model, small)


class Other(nn.Module):
    """In place of a block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2 + self.inner(hidden)


class Holds(Block):
    """Reads values of its own of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor, self.listed, self.table, self.number = torch.ones(1), [torch.ones(1)], {"rate": 1.0}, 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        factor = self.tensor * self.listed[0] * self.table["rate"] * self.number
        return hidden + torch.tanh(self.linear(hidden)) * factor


def patch(model: Stack) -> None:
    model.layers[0].forward = types.MethodType(lambda self, value: value * 3 + self.linear(value), model.layers[0])


CHANGES: dict[str, Callable[[Stack], object]] = {
    "a block more": lambda model: model.layers.append(copy.deepcopy(Block())),
    "another block": lambda model: model.layers.__setitem__(1, Other()),
    "a block less": lambda model: setattr(model, "layers", model.layers[:2]),
    "another forward": patch,
    "a tensor": lambda model: setattr(model.layers[0], "tensor", torch.full((1,), 2.0)),
    "an item of a list": lambda model: model.layers[1].listed.__setitem__(0, torch.full((1,), 3.0)),
    "a value of a dict": lambda model: model.layers[2].table.update(rate=3.0),
    "a number": lambda model: setattr(model.layers[2], "number", 0.5),
}


@pytest.mark.thinned(24)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_the_rewrite_are_noticed(change: str, spec: str) -> None:
    model = Stack(Holds)
    small = rewrite.optimize(copy.deepcopy(model), spec, example_inputs=(hidden(),))
    for module in (model, small):
        torch.manual_seed(2)
        CHANGES[change](module)

    assert_same_steps(model, small)


def test_one_tensor_given_twice_is_not_two() -> None:
    class Compares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return (self.linear(query) * 2).sum() if query is key else (self.linear(query) * self.linear(key)).sum()

    model = Compares()
    one, two = hidden(), hidden() + 1
    for example in ((one, two), (one, one)):
        small = rewrite.optimize(model, example_inputs=example)
        assert torch.equal(small(one, one), model(one, one))
        assert torch.equal(small(one, two), model(one, two))


def test_a_weight_replaced_before_the_backward_raises() -> None:
    small = rewrite.optimize(Stack(), [Checkpoint()], example_inputs=(hidden(),))
    loss = small(hidden())
    small.layers[1].linear.weight = nn.Parameter(torch.zeros(8, 8))

    with pytest.raises(rewrite.RecomputeError, match=r"'linear\.weight' was replaced between the forward and"):
        loss.backward()


def test_an_iterator_is_no_example() -> None:
    with pytest.raises(rewrite.InputError, match="an iterator would be used up"):
        rewrite.optimize(Stack(), example_inputs=(iter([hidden()]),))


@functools.lru_cache(None)
def doubled(width: int) -> torch.Tensor:
    return torch.ones(width) * 2


@pytest.mark.parametrize("frozen", [False, True], ids=["", "gc-frozen"])
def test_a_cached_function_keeps_no_fake(frozen: bool) -> None:
    class Cached(Block):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden + torch.tanh(self.linear(hidden)) * doubled(hidden.shape[-1])

    model = Stack(Cached)
    doubled.cache_clear()
    if frozen:
        gc.freeze()
    try:
        small = rewrite.optimize(copy.deepcopy(model), [Checkpoint()], example_inputs=(hidden(),))
    finally:
        gc.unfreeze()

    assert_same_steps(model, small)
