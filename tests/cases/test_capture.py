"""Reports of tracing that dropped what a model does."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import rewrite
from passes import Checkpoint
from tests.cases.recomputed import assert_recomputed
from tests.promises.pairs import names
from tests.zoo import ZOO, Mask
from tests.zoo.compare import assert_equal, run
from tests.zoo.coverage import uncovered
from tests.zoo.decoders import DECODERS
from tests.zoo.encoders import ENCODERS
from tests.zoo.entry import Inputs
from tests.zoo.plain import GatedBlock
from tests.zoo.sequence_to_sequence import SEQUENCE_TO_SEQUENCE

PLANS = {"untouched": [], "blocks": [Checkpoint()], "sqrt": [Checkpoint(policy="sqrt")]}
plans = pytest.mark.parametrize("plan", PLANS)
LANGUAGE_MODELS = ("gpt2", "llama", "bert", "t5")
MORE = tuple(e.name for e in (*DECODERS, *ENCODERS, *SEQUENCE_TO_SEQUENCE) if e.name not in LANGUAGE_MODELS)


class Flagged(GatedBlock):
    """A block that reads its training flag: in a branch, and for a dropout called as a function."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(hidden, 0.3, self.training)
        return super().forward(hidden * 2 if self.training else hidden)


class Head(nn.Module):
    """Blocks and the mean square of what they make."""

    def __init__(self, block: type[GatedBlock] = GatedBlock) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(16) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.pow(2).mean()


def made(model: nn.Module, plan: str, example: Any) -> nn.Module:
    """The model rewritten; with a plan that recomputes, its first block is recomputed."""
    small = rewrite.optimize(model, passes=PLANS[plan], example_inputs=example)
    if PLANS[plan]:
        assert_recomputed(small, "*0")
    return small


@pytest.mark.thinned(12)
@plans
@pytest.mark.parametrize("block", [GatedBlock, Flagged])
@pytest.mark.parametrize("first", ["train", "eval"])
def test_eval_is_deterministic_and_train_is_not(first: str, block: type[GatedBlock], plan: str) -> None:
    """pytorch/pytorch#68190, #151726: the training flag is baked in, dropout stays on after `eval()`."""
    model, hidden = Head(block).train(first == "train"), torch.randn(3, 5, 16)
    small = made(model, plan, hidden)
    small.eval()
    model.eval()
    assert small(hidden) == small(hidden) == model(hidden)
    small.train()
    assert small(hidden) != small(hidden)
    model.train()
    assert_equal(run(model, {"hidden": hidden}), run(small, {"hidden": hidden}))


@pytest.mark.thinned(6)
@plans
@pytest.mark.parametrize("part", ["blocks.1.dropout", "blocks.1"])
def test_one_part_in_eval_mode_stays_so(part: str, plan: str) -> None:
    """pytorch/pytorch#151726: a flag set on a submodule, after the rewrite, is honoured."""
    model, hidden = Head(Flagged), torch.randn(3, 5, 16)
    small = made(model, plan, hidden)
    for module in (model, small):
        module.get_submodule(part).eval()
    torch.manual_seed(1)
    expected = model(hidden)
    torch.manual_seed(1)
    assert expected == small(hidden)


class Centred(nn.Module):
    """Subtracts a mean that no gradient flows through."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean = hidden.mean()
        return hidden - mean


class CentredByDecorator(nn.Module):
    """The same, with the span around a method."""

    @torch.no_grad()
    def mean(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.mean()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden - self.mean(hidden)


class CentredBlock(nn.Module):
    """A residual-free block around `Centred`, so that a lost `no_grad` changes the gradient."""

    def __init__(self, centred: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.centred = centred

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.centred(hidden) * self.scale


@pytest.mark.thinned(3)
@plans
@pytest.mark.parametrize("kind", [Centred, CentredByDecorator])
def test_no_grad_is_kept(kind: type[nn.Module], plan: str) -> None:
    """pytorch/pytorch#62043: the `no_grad` region is dropped; the gradient of the sum is then 0, not 1."""
    model = nn.Sequential(CentredBlock(kind()), CentredBlock(kind()))
    hidden = torch.randn(4, 4, requires_grad=True)
    small = made(model, plan, hidden)
    small(hidden).sum().backward()
    assert torch.equal(hidden.grad, torch.ones(4, 4))


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(GatedBlock(16) for _ in range(2))
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


@plans
def test_tied_parameters_stay_one(plan: str) -> None:
    """pytorch/pytorch#99407, #142176: state_dict keys or ties lost."""
    model, inputs = Tied(), {"tokens": torch.randint(0, 20, (2, 6))}
    small = made(model, plan, inputs)
    assert list(small.state_dict()) == list(model.state_dict())
    assert small.head.weight is small.embedding.weight is model.embedding.weight
    assert_equal(run(model, inputs), run(small, inputs))
    untied = copy.deepcopy(model)
    untied.head.weight = nn.Parameter(untied.embedding.weight.detach().clone())
    apart, summed = run(untied, inputs).grads, run(small, inputs).grads["embedding.weight"]
    torch.testing.assert_close(summed, apart["embedding.weight"] + apart["head.weight"])
    assert apart["embedding.weight"].abs().sum() > 0


@pytest.mark.thinned(4)
@names(*LANGUAGE_MODELS, sweep=MORE)
def test_language_models_are_captured_or_refused_with_module_and_line(name: str) -> None:
    """huggingface/transformers#36022, #30244: Llama and friends are untraceable."""
    entry = ZOO[name]
    model, inputs = entry.build(), entry.inputs(*entry.shapes[0], entry.masks[0])
    program = rewrite.capture(model, inputs)
    assert len(program.regions) > 1
    assert_told(program, model)
    refused = [f"{entry.path}." for entry in program.opaque]
    missed = {path for path in uncovered(model, program) if not f"{path}.".startswith(tuple(refused))}
    assert not missed & called(model, inputs)


def called(model: nn.Module, inputs: Inputs) -> set[str]:
    """Paths of the modules that a call of the untouched model calls."""
    found: set[str] = set()
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: found.add(path))
    model(**inputs)
    return found


def assert_told(program: rewrite.Program, model: nn.Module) -> None:
    """What was refused names a module of the model, a line of Python and a reason."""
    modules = dict(model.named_modules())
    for entry in program.opaque:
        assert entry.path in modules
        assert entry.reason
        assert re.fullmatch(r"\w+\.py:\d+", entry.source), entry


def lists(module: nn.Module, hidden: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
    seen.append(hidden)
    return hidden


def asks(module: nn.Module, hidden: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
    return hidden if hidden.sum() > 0 else -hidden


def draws(module: nn.Module, hidden: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
    return hidden * random.random()


def remembers(module: nn.Module, hidden: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
    module.last = hidden
    return hidden


class Odd(GatedBlock):
    """A block that does something no graph can hold."""

    def __init__(self, does: Callable[..., torch.Tensor]) -> None:
        super().__init__(16)
        self.does = does

    def forward(self, hidden: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        return super().forward(self.does(self, hidden, seen))


class OddModel(nn.Module):
    def __init__(self, does: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Odd(does) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        for block in self.blocks:
            hidden = block(hidden, seen)
        return hidden.pow(2).mean()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("does", [lists, asks, draws, remembers])
def test_what_is_refused_is_told_with_module_and_line(does: Callable[..., torch.Tensor]) -> None:
    """huggingface/transformers#36022: a model that is not captured, and no word of where it fails."""
    model = OddModel(does)
    program = rewrite.capture(model, torch.randn(3, 16))
    assert {"blocks.0", "blocks.1"} <= {entry.path for entry in program.opaque}
    assert_told(program, model)


@pytest.mark.thinned(6)
@plans
@pytest.mark.parametrize("first", ["absent", "padded"])
@names("bert", sweep=("llama", "torch-transformer"))
def test_an_optional_mask_may_come_and_go(name: str, first: Mask, plan: str) -> None:
    """An optional argument is traced as None, its branch baked, and a mask given later is ignored."""
    entry = ZOO[name]
    model = entry.build()
    small = made(model, plan, entry.inputs(*entry.shapes[0], first))
    losses = []
    for mask in ("absent", "padded", "unpadded", "absent"):
        inputs = entry.inputs(*entry.shapes[0], mask)
        found = run(small, inputs)
        assert_equal(run(model, inputs), found)
        losses.append(float(found.loss))
    assert losses[0] == losses[3] != losses[1]


class Rounded(torch.autograd.Function):
    """Rounds forward, passes the gradient straight through."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.round()

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class StraightThrough(nn.Module):
    """A linear layer whose output is rounded with a straight-through gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + Rounded.apply(4 * self.linear(hidden))


@plans
def test_a_straight_through_function_keeps_its_gradient(plan: str) -> None:
    """A custom `autograd.Function` has its backward dropped: export gives a gradient of zero."""
    model = nn.Sequential(StraightThrough(), StraightThrough())
    hidden = torch.randn(3, 16)
    small = made(model, plan, hidden)
    small(hidden).sum().backward()
    passed = torch.ones(3, 16) + 4 * torch.ones(3, 16) @ model[1].linear.weight.detach()
    torch.testing.assert_close(model[0].linear.bias.grad, 4 * passed.sum(0))
    torch.testing.assert_close(model[0].linear.weight.grad, 4 * passed.T @ hidden)


class Hooked(nn.Module):
    """A block whose output a forward hook doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.linear.register_forward_hook(lambda _, __, output: 2 * output)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.linear(hidden)


class Cast(nn.Module):
    """A block that computes its product under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = self.linear(hidden)
        return hidden + product.float()


class Writing(nn.Module):
    """A block that counts its calls and keeps a running mean in buffers, and works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean.mul_(0.9).add_(hidden.detach().flatten(0, -2).mean(0), alpha=0.1)
        inner = self.linear(hidden - self.mean)
        inner.relu_()
        return hidden + inner


@pytest.mark.thinned(9)
@plans
@pytest.mark.parametrize("block", [Hooked, Cast, Writing], ids=lambda block: block.__name__)
def test_what_a_block_does_besides_its_products_is_kept(plan: str, block: type[nn.Module]) -> None:
    """pytorch/pytorch#62043 and kin: hooks, autocast, buffer writes and in-place ops are dropped by tracers."""
    model = nn.Sequential(block(), block(), Head())
    hidden = torch.randn(3, 16)
    small = made(model, plan, hidden)
    for train in (True, False):
        assert_equal(run(model, {"input": hidden}, 2, train), run(small, {"input": hidden}, 2, train))
