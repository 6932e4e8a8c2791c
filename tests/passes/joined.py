"""Models that concatenate, for the tests of SplitGradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from tests.bench.vision import UNet
from tests.zoo.entry import Inputs


def unet() -> UNet:
    """A small U whose gradients and skips count for about as much as its weights."""
    torch.manual_seed(0)
    return UNet((16, 32, 64, 128), 1)


def images(batch: int = 2, side: int = 32) -> Inputs:
    """What `unet` takes."""
    made = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(1))
    return {"images": made, "targets": made.flip(0).contiguous()}


class Joined(nn.Module):
    """`early` of x, then layers, then both joined by `join`; returns the mean square."""

    def __init__(self, early: nn.Module, join: Callable[..., torch.Tensor] | None = None, channels: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.early = early
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.drop = nn.Dropout(0.1)
        self.join = join or (lambda late, skip: torch.cat([late, skip], 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.early(self.stem(x))
        late = functional.gelu(self.second(self.drop(functional.gelu(self.first(skip * 0.5)))))
        return self.join(late, skip).pow(3).mean()


class Added(nn.Module):
    """Adds a parameter of the given shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Up(nn.Module):
    """Doubles the side and joins a skip that it is given."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inside, outside, 2, 2)
        self.conv = nn.Conv2d(2 * outside, outside, 3, padding=1)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.conv(torch.cat([skip, self.up(x)], dim=1)))


class PassedSkips(nn.Module):
    """A U whose blocks join the skips they are given."""

    def __init__(self, early: type[nn.Module] = nn.SiLU) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.early = early()
        self.down = nn.ModuleList([nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([Up(8, 8), Up(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.early(self.stem(x)), []
        for layer in self.down:
            skips.append(x)
            x = functional.silu(layer(x))
        x = self.middle(x)
        for block in self.up:
            x = block(x, skips.pop())
        return x.pow(2).mean()


class DenseLayer(nn.Module):
    """Joins all features before it and makes a few more."""

    def __init__(self, inside: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inside)
        self.conv = nn.Conv2d(inside, growth, 3, padding=1)
        self.drop = nn.Dropout(0.1)

    def forward(self, features: list[torch.Tensor]) -> torch.Tensor:
        return self.drop(self.conv(functional.relu(self.norm(torch.cat(features, 1)))))


class DenseNet(nn.Module):
    """Each layer takes the features of all before; `growing` joins them once more at every layer."""

    def __init__(self, growing: bool = False, growth: int = 8, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.growing = growing
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.layers = nn.ModuleList([DenseLayer(16 + growth * place, growth) for place in range(layers)])
        self.head = nn.Conv2d(16 + growth * layers, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [functional.relu(self.stem(x))]
        for layer in self.layers:
            features.append(layer(features))
            if self.growing:
                features = [torch.cat(features, 1)]
        return self.head(torch.cat(features, 1)).pow(2).mean()
