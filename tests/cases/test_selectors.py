"""Reports of a policy that names what is not there, and does nothing without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint, ChunkFFN
from tests.cases.recomputed import recomputed
from tests.zoo.plain import GatedBlock


class Model(nn.Module):
    """Blocks, and a part that only training runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GatedBlock(8) for _ in range(2))
        self.extra = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return (hidden + self.extra(hidden) if self.training else hidden).pow(2).mean()


class Asking(Model):
    """Its own forward has no graph."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        loss = super().forward(hidden)
        return loss if loss.item() > 0 else -loss


@pytest.mark.thinned(10)
@pytest.mark.parametrize("example", [torch.randn(3, 8), None], ids=["now", "at the first call"])
@pytest.mark.parametrize("kind", [Model, Asking])
@pytest.mark.parametrize("select", ["no.such.block", "aten.mm", ("blocks.0", "aten.mm.default"), "blocks.2"])
def test_a_selector_that_matches_nothing_raises(select: Any, kind: type[Model], example: torch.Tensor | None) -> None:
    """pytorch/pytorch#176065: a policy that names an op packet matches nothing, silently."""
    missing = select if isinstance(select, str) else select[-1]
    with pytest.raises(rewrite.SelectorError, match="it matches no module") as caught:
        rewrite.optimize(kind(), [Checkpoint(select=select)], example_inputs=example)(torch.randn(3, 8))
    assert f"select={missing}}}" in str(caught.value)


@pytest.mark.parametrize("select", [torch.ops.aten.mm, (torch.ops.aten.mm.default,)])
def test_an_operator_is_no_selector(select: Any) -> None:
    """pytorch/pytorch#176065: an op packet, given as it is."""
    with pytest.raises(rewrite.RewriteError, match="select"):
        rewrite.optimize(Model(), [Checkpoint(select=select)], example_inputs=torch.randn(3, 8))


@pytest.mark.parametrize("select", [7, ("layers.*", 7)])
@pytest.mark.parametrize("kind", [Checkpoint, ChunkFFN])
def test_a_selector_is_a_text(kind: Any, select: Any) -> None:
    with pytest.raises(rewrite.PassError, match="takes a text or a tuple of texts, not"):
        kind(select=select)


@pytest.mark.parametrize("select", [(), ""])
def test_an_empty_selector_raises(select: Any) -> None:
    """pytorch/pytorch#176065: a policy that selects nothing at all."""
    with pytest.raises(rewrite.PassError, match="it names no module"):
        Checkpoint(select=select)


def test_what_only_training_runs_may_be_selected() -> None:
    """pytorch/pytorch#176065, the other way round: a selector that matched does not raise later, in evaluation."""
    model, hidden = Model(), torch.randn(3, 8)
    small = rewrite.optimize(model, [Checkpoint(select="extra")], example_inputs=hidden)
    assert {"extra.0", "extra.1"} <= recomputed(small)
    assert torch.equal(small.eval()(hidden), model.eval()(hidden))
