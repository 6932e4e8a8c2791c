"""Reports of recomputation that was lost, or ran code twice, where a part of a model could not be captured."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import rewrite
from tests.cases.recomputed import SPECS, assert_recomputed, saved_bytes
from tests.zoo.compare import assert_equal, run
from tests.zoo.plain import GatedBlock

WIDTH = 16


ASKED: Counter[nn.Module] = Counter()
"""How often each gate has run."""


class Gate(nn.Module):
    """Scales by the largest value, which it asks for: no graph can hold it."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        ASKED[self] += 1
        return hidden / (1 + hidden.detach().abs().max().item())


class Gated(nn.Module):
    """A block with a gate inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.gate = Gate()
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = functional.gelu(functional.gelu(self.up(hidden)))
        return hidden + functional.dropout(self.down(self.gate(inner)), 0.1, self.training)


class Asking(Gated):
    """A block that asks a tensor for a number in its own forward."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * (1 + hidden.detach().mean().item())


class RecomputedGated(Gated):
    """A block that its author recomputes, gate and all."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, hidden, use_reentrant=False)


class Holding(nn.Module):
    """A block that its author recomputes, around one that cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Asking()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, hidden, use_reentrant=False)


class Stack(nn.Module):
    """Blocks in a row, and the mean square of what they make."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.pow(2).mean()


def batch() -> torch.Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))


def asked(model: Stack) -> list[int]:
    """How often the gate of each block runs in a step."""
    ASKED.clear()
    model(batch()).backward()
    return [ASKED[module] for module in model.modules() if isinstance(module, Gate)]


@pytest.mark.thinned(12)
@pytest.mark.parametrize("spec", ["", *SPECS])
@pytest.mark.parametrize("kind", [Gated, Asking, RecomputedGated, Holding])
def test_saved_bytes_do_not_rise_where_a_part_falls_back(kind: type[nn.Module], spec: str) -> None:
    """Lightning-AI/lightning-thunder#2527: the model's own recomputation, or ours, is lost where a region fell back.

    Nor may what fell back be recomputed, Python and all, where the author does not.
    """
    model = Stack(*(kind() for _ in range(3)))
    small = rewrite.optimize(copy.deepcopy(model), spec, example_inputs=batch())
    assert len(rewrite.report(small).opaque) >= 3
    assert_equal(run(model, {"hidden": batch()}, 1), run(small, {"hidden": batch()}, 1))
    assert asked(model) == asked(small) == [2 if kind in (RecomputedGated, Holding) else 1] * 3
    assert saved_bytes(small, batch()) <= saved_bytes(model, batch())


@pytest.mark.thinned(3)
@pytest.mark.parametrize("spec", SPECS)
def test_all_but_what_fell_back_is_recomputed(spec: str) -> None:
    """Lightning-AI/lightning-thunder#2527: what is not captured takes its block, or its neighbours, along."""
    model = Stack(GatedBlock(WIDTH), GatedBlock(WIDTH), Asking(), Gated(), Gated())
    small = rewrite.optimize(model, spec, example_inputs=batch())
    assert_recomputed(small, "blocks.0", "blocks.1", "blocks.3", "blocks.4")
    assert_equal(run(model, {"hidden": batch()}), run(small, {"hidden": batch()}))
    assert saved_bytes(small, batch()) < 0.8 * saved_bytes(model, batch())


class Silent(nn.Module):
    """A block that its author recomputes, with a span of no_grad in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def part(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.linear(hidden).mean()
        return torch.tanh(self.linear(hidden)) * scale

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + checkpoint(self.part, hidden, use_reentrant=False)


class Cast(Silent):
    """The same with a span of autocast."""

    def part(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = self.linear(hidden)
        return torch.tanh(product.float())


@pytest.mark.thinned(6)
@pytest.mark.parametrize("spec", ["", *SPECS, "checkpoint{policy=sqrt},checkpoint"])
@pytest.mark.parametrize("kind", [Silent, Cast])
def test_a_span_inside_what_the_model_recomputes_itself_is_kept(kind: type[Silent], spec: str) -> None:
    """pytorch/pytorch#62043: the `no_grad` region is dropped, here inside a part that the author recomputes."""
    model = Stack(*(kind() for _ in range(3)))
    small = rewrite.optimize(model, spec, example_inputs=batch())
    assert not rewrite.report(small).opaque
    assert_recomputed(small, *(f"blocks.{place}" for place in range(3)))
    assert_equal(run(model, {"hidden": batch()}, 1), run(small, {"hidden": batch()}, 1))
    assert saved_bytes(small, batch()) <= saved_bytes(model, batch())
