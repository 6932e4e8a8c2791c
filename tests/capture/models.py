"""Small models for tests of capture and emission."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import rewrite
from rewrite.program import Program, Region
from rewrite.text import region_text


class Does(nn.Module):
    """A linear layer, a buffer, and whatever forward a test wants: `forward(module, *args, **kwargs)`."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.does = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.does(self, *args, **kwargs)


class Block(nn.Module):
    """`x + dropout(linear(x))`."""

    def __init__(self, index: int = 0, width: int = 4, rate: float = 0.1) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(rate)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(torch.tanh(self.linear(hidden)))


class Stack(nn.Module):
    """A first layer, blocks one after another, and the mean square of what they make."""

    def __init__(self, blocks: int | Sequence[nn.Module] = 3, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        made = [kind(index) for index in range(blocks)] if isinstance(blocks, int) else blocks
        self.blocks = nn.ModuleList(made)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.pow(2).mean()


def hidden(batch: int = 3, length: int = 5, width: int = 4, seed: int = 1) -> torch.Tensor:
    """Normal numbers of shape (batch, length, width)."""
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(seed))


def root(program: Program) -> Region:
    return program.region("")


def code(model: nn.Module, *args: Any) -> str:
    """Text of the root's graph."""
    return region_text(root(rewrite.capture(model, args)))


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, NaN equal to NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dict__"):
        return same(vars(one), vars(other))
    return bool(one == other)
