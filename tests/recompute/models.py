"""Stacks of small blocks, rewritten with any choice of what is kept, and one training step of each to compare."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

import rewrite
from passes import Checkpoint
from rewrite import KEEP, KEEP_STATE, RECOMPUTE, RELEASE, Numerics, Pass, PassResult, Program
from rewrite.plan.apply import tag_passing
from rewrite.plan.curve import EACH, ONCE
from tests.cases.recomputed import recomputed

BATCH, LENGTH, WIDTH = 4, 6, 8


@dataclass(frozen=True)
class Subset(Pass):
    """Recompute every block; keep values, and what operators save for themselves, by chance."""

    name: ClassVar[str] = "subset"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    seed: int = 0
    keep: float = 0.0
    """How likely a node's value is kept."""
    state: float = 0.0
    release: float = 0.0
    """How likely a value goes after its first run in the backward."""
    passing: str = ""
    """What becomes of what passes between blocks: held, or made again `once` or for `each` use."""

    def apply(self, program: Program) -> PassResult:
        result = Checkpoint(policy="blocks").apply(program)
        chance = random.Random(self.seed)
        for node in (node for region in result.program.regions for node in region.nodes() if RECOMPUTE in node.meta):
            for tag, likely in ((KEEP, self.keep), (KEEP_STATE, self.state), (RELEASE, self.release)):
                if chance.random() < likely:
                    node.meta[tag] = True
        if self.passing:
            self._group(result.program)
        return result

    def _group(self, program: Program) -> None:
        """Hold nothing of what passes between blocks in a row."""
        around = program.regions[0]
        calls = [node for node in around.nodes() if node.meta.get("block") and not node.meta.get("hooked")]
        if any(RECOMPUTE in node.meta for node in around.nodes()) or around.written_buffers:
            return
        tag_passing(around, {node.name: self.passing for node in calls})


NOTHING = Subset()
VALUES = Subset(keep=1.0)
STATES = Subset(state=1.0)
EVERYTHING = Subset(keep=1.0, state=1.0)
SOME = Subset(seed=1, keep=0.4, state=0.4)
RELEASED = Subset(release=1.0)
PASSED = Subset(passing=ONCE)
PASSED_EACH = Subset(seed=1, keep=0.4, state=0.4, release=0.4, passing=EACH)
SUBSETS = (NOTHING, STATES, EVERYTHING, SOME, RELEASED, PASSED, PASSED_EACH)

Body = Callable[[Any, torch.Tensor], Any]


class Block(nn.Module):
    """Two linear layers, whatever else is given, and a body that uses them."""

    def __init__(self, body: Body, **layers: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body = body
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        for name, layer in layers.items():
            setattr(self, name, layer())

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.body(self, hidden)


class Stack(nn.Module):
    """Two blocks, one after the other."""

    def __init__(self, make: Callable[[], nn.Module], blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(blocks))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def mlp(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    inner = nn.functional.gelu(block.up(nn.functional.layer_norm(hidden, (WIDTH,))))
    return hidden + block.down(nn.functional.dropout(inner, 0.3, block.training))


def hidden(seed: int = 0, **options: Any) -> torch.Tensor:
    """An input that needs a gradient."""
    made = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed), **options)
    return made.requires_grad_()


def stacks(subset: Pass, body: Body = mlp, **layers: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A stack, and the rewrite of an equal one with weights of its own; its blocks are recomputed."""
    return pair(Stack(lambda: Block(body, **layers)), subset, hidden())


def pair(plain: nn.Module, subset: Pass, *inputs: Any) -> tuple[nn.Module, nn.Module]:
    """The module, and a rewritten copy that recomputes blocks."""
    small = rewrite.optimize(copy.deepcopy(plain), passes=[subset], example_inputs=inputs)
    assert recomputed(small)
    return plain, small


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, (tuple, list)):
        return torch.stack([loss_of(item) for item in output]).sum()
    return output.double().pow(2).sum()


def forward(model: nn.Module, given: torch.Tensor, *, seed: int = 3, train: bool = True) -> torch.Tensor:
    """The loss of a step, random numbers from `seed`."""
    model.train(train)
    model.zero_grad()
    torch.manual_seed(seed)
    return loss_of(model(given))


def left(model: nn.Module, *more: Any) -> list[Any]:
    """What a step leaves: gradients, buffers, the state of the generator, and more."""
    grads = [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    return [grads, buffers, torch.get_rng_state(), [tensors(each) for each in more]]


def tensors(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [tensors(item) for item in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def step(model: nn.Module, given: torch.Tensor, *, seed: int = 3, train: bool = True) -> list[Any]:
    """One forward and backward, and what they left."""
    given = given.detach().requires_grad_(given.requires_grad)
    loss = forward(model, given, seed=seed, train=train)
    loss.backward()
    return left(model, loss, given.grad)


def assert_same(expected: Any, found: Any, where: str = "") -> None:
    """Bit-equal tensors in equal structures; a NaN is equal to a NaN."""
    assert type(expected) is type(found), f"{where}: {type(expected)} and {type(found)}"
    if isinstance(expected, list):
        assert len(expected) == len(found), where
        for place, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert_same(one, other, f"{where}.{place}")
    elif isinstance(expected, torch.Tensor):
        assert expected.dtype == found.dtype, where
        assert torch.allclose(expected, found, rtol=0, atol=0, equal_nan=True), where
    else:
        assert expected == found, where
