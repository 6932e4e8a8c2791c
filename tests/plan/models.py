"""Small models whose blocks differ, whose blocks are shared, and whose values skip blocks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.passes.models import Layer


class Stack(nn.Module):
    """Embedding, layers of the given inner widths, and a loss over the tokens themselves."""

    def __init__(self, *inner: int, width: int = 32, shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, width)
        if shared:
            self.layers, self.runs = nn.ModuleList([Layer(width, inner[0])]), len(inner)
        else:
            self.layers, self.runs = nn.ModuleList(Layer(width, each) for each in inner), 1
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for _ in range(self.runs):
            for layer in self.layers:
                hidden = layer(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class Twice(nn.Module):
    """A layer that runs on data and then on what it gave, which is called in two ways: gradients flow into one."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width, 4 * width) for _ in range(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for place in (0, 0, 1, 0):
            hidden = self.layers[place](hidden)
        return hidden.pow(2).mean()


class Bridged(nn.Module):
    """Plain layers without a stack, whose first value is added again near the end."""

    def __init__(self, depth: int = 10, width: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first = None
        for layer in self.inside:
            hidden = functional.gelu(layer(hidden)) * 2
            first = hidden if first is None else first
        return (hidden + first).pow(2).mean()


class Joined(nn.Module):
    """Layers between a wide value and its concatenation with what they made of it: half the gradient of that waits."""

    def __init__(self, width: int = 32, wide: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.widen, self.narrow, self.again = nn.Linear(width, wide), nn.Linear(wide, width), nn.Linear(width, wide)
        self.layers = nn.ModuleList(Layer(width, 16 * width) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        first = self.widen(hidden)
        hidden = self.narrow(first)
        for layer in self.layers:
            hidden = layer(hidden)
        return torch.cat([self.again(hidden), first], -1).pow(2).mean()


class Convolutions(nn.Module):
    """A block whose input is as large as anything in it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, 1, 1)
        self.norm = nn.GroupNorm(4, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return functional.silu(self.conv2(functional.silu(self.norm(self.conv1(image)))))


class Level(nn.Module):
    """A stem and blocks of convolutions on one size of images."""

    def __init__(self, blocks: int = 2, channels: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, channels, 3, 1, 1)
        self.blocks = nn.ModuleList(Convolutions(channels) for _ in range(blocks))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.pow(2).mean()


def tokens(batch: int = 4, length: int = 48) -> torch.Tensor:
    """Ids below 64 of shape (batch, length)."""
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(1))
