"""A rewritten model is measured by the code that it runs, whatever tensors its modules hold beside parameters."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint
from rewrite.identity import identity, standing_for
from rewrite.memory.allocator import allocated_peak_bytes

WIDTH = 64


class Holder(nn.Module):
    """A block that multiplies by a tensor which it holds in one way or another."""

    def __init__(self, hold: Callable[[nn.Module, torch.Tensor], None]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        hold(self, torch.linspace(0, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = vars(self.scale)["values"] if isinstance(self.scale, SimpleNamespace) else self.scale
        scale = held[0] if isinstance(held, list) else held
        return x + self.down(torch.tanh(self.up(x * scale)).sin())


class Recurrent(nn.Module):
    """A block whose layer holds its parameters in a list too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.layer(x)[0])


class Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "attribute": lambda: Holder(lambda block, value: setattr(block, "scale", value)),
    "list": lambda: Holder(lambda block, value: setattr(block, "scale", [value])),
    "options": lambda: Holder(lambda block, value: setattr(block, "scale", SimpleNamespace(values=[value]))),
    "parameter": lambda: Holder(lambda block, value: setattr(block, "scale", nn.Parameter(value))),
    "gru": lambda: Recurrent("GRU"),
    "rnn": lambda: Recurrent("RNN"),
    "lstm": lambda: Recurrent("LSTM"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_what_recomputing_saves_is_seen(name: str) -> None:
    model, x = Stack(BLOCKS[name]), torch.randn(16, 32, WIDTH)
    small = rewrite.optimize(model, [Checkpoint(policy="blocks")], example_inputs=x)
    before, after = rewrite.estimate(model, x), rewrite.estimate(small, x)
    assert after.saved_bytes < 0.5 * before.saved_bytes
    for _ in range(2):  # nothing of the first is left for the second to free
        assert allocated_peak_bytes(small, x) == pytest.approx(after.peak_bytes, rel=0.002)


@pytest.mark.parametrize("name", ["attribute", "list"])
@pytest.mark.parametrize("budget", [False, True])
def test_the_tensors_of_a_model_are_left_as_they_were(name: str, budget: bool) -> None:
    """A step that is measured runs on stand-ins for them, in generated code too, and gives them no gradient."""
    held = torch.linspace(0, 1, WIDTH).requires_grad_()
    hold = lambda block, value: setattr(block, "scale", held)  # noqa: E731
    if name == "list":
        hold = lambda block, value: setattr(block, "scale", [held])  # noqa: E731
    model, x = Stack(lambda: Holder(hold)), torch.randn(16, 32, WIDTH)
    if budget:
        wanted = int(rewrite.estimate(model, x).peak_bytes * 0.8)
        small = rewrite.optimize(model, budget=wanted, example_inputs=x, allow="exact")
    else:
        small = rewrite.optimize(model, [Checkpoint(policy="blocks")], example_inputs=x)
    rewrite.estimate(small, x)
    allocated_peak_bytes(small, x)
    assert held.grad is None

    small(x).backward()
    found, held.grad = held.grad, None
    model(x).backward()
    assert type(found) is torch.Tensor
    assert torch.equal(found, held.grad)


class Counting(nn.Module):
    """A block that counts its calls in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.calls = nn.Linear(WIDTH, WIDTH), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return torch.tanh(self.up(x))


def test_a_step_that_is_measured_writes_to_stand_ins() -> None:
    model, x = Stack(Counting), torch.randn(4, WIDTH)
    small = rewrite.optimize(model, [Checkpoint(policy="blocks")], example_inputs=x)
    before = small.blocks[0].calls.clone()  # type: ignore[union-attr, index, operator]
    rewrite.estimate(small, x)
    allocated_peak_bytes(small, x)
    assert torch.equal(small.blocks[0].calls, before)  # type: ignore[union-attr, index, operator]


def test_a_large_tensor_that_is_no_buffer_counts_once() -> None:
    tables = [torch.randn(4096, WIDTH) for _ in range(4)]
    given = iter(tables)
    model = Stack(lambda: Holder(lambda block, value: setattr(block, "scale", next(given)[0])))
    x = torch.randn(16, 32, WIDTH)
    small = rewrite.optimize(model, [Checkpoint(policy="blocks")], example_inputs=x)
    before, after = rewrite.estimate(model, x), rewrite.estimate(small, x)
    assert after.by_category["buffer"] == before.by_category["buffer"] >= 4 * tables[0].nbytes
    assert allocated_peak_bytes(small, x) == pytest.approx(after.peak_bytes, rel=0.002)


def test_a_stand_in_is_taken_for_what_it_stands_for_within_the_block_alone() -> None:
    one, other = torch.zeros(1), torch.ones(1)
    with standing_for([(one, other)]):
        assert identity(other) == identity(one) == id(one)
        with ThreadPoolExecutor(1) as elsewhere:  # another thread runs its models as they are
            assert elsewhere.submit(identity, other).result() == id(other)
    assert identity(other) == id(other)


def test_what_is_counted_without_code_is_said() -> None:
    model, x = Stack(BLOCKS["attribute"]), torch.randn(16, 32, WIDTH)
    small = rewrite.optimize(model, [Checkpoint(policy="blocks")], example_inputs=x)
    assert not rewrite.estimate(small, x).assumptions
    forward = vars(small.blocks[1])["forward"]  # type: ignore[union-attr, index, operator]
    forward.forget()
    vars(small)["forward"].forget()
    forward.rewriting.failed.clear()
    vars(small)["forward"].rewriting.without_graph = {("", vars(small)["forward"].flags())}
    told = rewrite.estimate(small, x).assumptions
    assert told == ("blocks.1: counted as its own forward runs, for there is no code for it",)
