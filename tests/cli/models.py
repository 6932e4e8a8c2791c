"""Small models as a user would hand them to the command line."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Refusing(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the tokenizer is missing")


CALLS = [0]


class Drifting(nn.Module):
    """Gives another result at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS[0] += 1
        return self.linear(x).sum() * CALLS[0]


def stack(batch: int = 4, depth: int = 3, width: int = 64) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Stack(depth, width), {"x": torch.randn(batch, width)}


def sequences(
    batch: int = 4, seq: int = 16, depth: int = 2, width: int = 32
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Stack(depth, width), {"x": torch.randn(batch, seq, width)}


def refusing() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Refusing(2, 8), {"x": torch.randn(2, 8)}


def wrong_inputs() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Stack(2, 8), {"x": torch.randn(2, 9)}


def wrong_name() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Stack(2, 8), {"y": torch.randn(2, 8)}


def drifting() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return Drifting(), (torch.randn(2, 4),)


def without_inputs() -> nn.Module:
    return Stack(2, 8)


def failing() -> nn.Module:
    raise FileNotFoundError("weights.bin is not there")


def number() -> int:
    return 3
