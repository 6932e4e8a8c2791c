"""Convolutions: a residual network with BatchNorm, and a U-shaped one whose skips cross every block between."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from tests.bench.workload import Workload


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut, over (batch, channels, height, width)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet(nn.Module):
    """Stem, residual blocks in stages, pooled classifier; returns the cross-entropy."""

    def __init__(self, channels: Sequence[int], blocks_per_stage: int, classes: int) -> None:
        super().__init__()
        first = channels[0]
        self.stem = nn.Sequential(nn.Conv2d(3, first, 3, 2, 1, bias=False), nn.BatchNorm2d(first), nn.ReLU())
        blocks, inside = [], first
        for stage, outside in enumerate(channels):
            blocks.append(ResidualBlock(inside, outside, 2 if stage else 1))
            blocks += [ResidualBlock(outside, outside, 1) for _ in range(blocks_per_stage - 1)]
            inside = outside
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(inside, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), labels)


class ConvBlock(nn.Module):
    """Two 3x3 convolutions, each with GroupNorm and SiLU."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, 1, 1)
        self.norm1 = nn.GroupNorm(8, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1)
        self.norm2 = nn.GroupNorm(8, outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.silu(self.norm1(self.conv1(x)))
        return functional.silu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """Down, middle and up, each level joined to its opposite by a skip; returns the mean squared error."""

    def __init__(self, channels: Sequence[int], blocks_per_level: int) -> None:
        def level(inside: int, outside: int) -> nn.Sequential:
            return nn.Sequential(
                ConvBlock(inside, outside), *[ConvBlock(outside, outside) for _ in range(blocks_per_level - 1)]
            )

        super().__init__()
        self.stem = nn.Conv2d(3, channels[0], 3, 1, 1)
        pairs = list(itertools.pairwise(channels))
        self.down = nn.ModuleList([level(inside, outside) for inside, outside in pairs])
        self.middle = level(channels[-1], channels[-1])
        self.up = nn.ModuleList([level(2 * outside, inside) for inside, outside in reversed(pairs)])
        self.head = nn.Conv2d(channels[0], 3, 1)

    def forward(self, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x, skips = self.stem(images), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            x = block(torch.cat([functional.interpolate(x, scale_factor=2.0), skip], 1))
        return functional.mse_loss(self.head(x), targets)


def resnet_like(
    channels: Sequence[int] = (64, 128, 256, 512), blocks_per_stage: int = 3, side: int = 152, batch: int = 4
) -> Workload:
    """By default gradients are about a third of eager's peak, and stock block checkpoint reaches two thirds of it."""
    torch.manual_seed(0)
    model = ResNet(channels, blocks_per_stage, classes=100)
    inputs = {"images": torch.randn(batch, 3, side, side), "labels": torch.randint(0, 100, (batch,))}
    return Workload(model, inputs, blocks=list(model.blocks))


def unet_like(
    channels: Sequence[int] = (32, 64, 128, 256), blocks_per_level: int = 2, side: int = 72, batch: int = 1
) -> Workload:
    """By default gradients are about half of eager's peak, and stock block checkpoint reaches two thirds of it."""
    torch.manual_seed(0)
    model = UNet(channels, blocks_per_level)
    images = torch.randn(batch, 3, side, side)
    blocks = [block for level in (*model.down, model.middle, *model.up) for block in level]
    return Workload(model, {"images": images, "targets": torch.randn_like(images)}, blocks, chained=False)
