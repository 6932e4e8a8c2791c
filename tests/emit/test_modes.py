"""An error inside an unrolled span of no_grad or autocast leaves no mode behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint


class Spans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            hidden = self.embed(ids)
        return self.linear(hidden).sum()


@pytest.mark.parametrize("passes", [[], [Checkpoint(select="embed")]], ids=["untouched", "recomputed"])
def test_modes_after_an_error(passes: list[Checkpoint]) -> None:
    small = rewrite.optimize(Spans(), passes, example_inputs=(torch.zeros(2, 3, dtype=torch.long),))

    with pytest.raises(IndexError):
        small(torch.full((2, 3), 99))

    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert small(torch.zeros(2, 3, dtype=torch.long)).requires_grad
