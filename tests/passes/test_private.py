"""Private torch names that passes lean on: each still does what is said of it."""

from __future__ import annotations

from typing import Any

import torch

from passes.private import graph_is_kept


def test_graph_is_kept() -> None:
    seen: list[bool] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(graph_is_kept())
            return grad

    made = Asks.apply(torch.ones(1, requires_grad=True))
    made.backward(retain_graph=True)
    made.backward()
    assert seen == [True, False]
