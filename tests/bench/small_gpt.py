"""The small GPT that the bars are about, and twelve plain blocks without a head."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.bench.workload import Head, Workload


class FeedForward(nn.Module):
    """Norm, up, GELU, down."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(self.norm(x))))


class Block(nn.Module):
    """A pre-norm decoder block over (batch, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = FeedForward(width)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class SmallGPT(nn.Module):
    """Embedding, blocks, norm, head; returns the mean cross-entropy over every token."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.hidden(ids)).flatten(0, 1), targets.flatten())


class PlainBlocks(nn.Module):
    """Blocks alone; returns the mean square of what they give."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def small_gpt(
    layers: int = 8, width: int = 128, heads: int = 4, length: int = 512, batch: int = 2, vocabulary: int = 4096
) -> Workload:
    torch.manual_seed(0)
    model = SmallGPT(layers, width, heads, vocabulary)
    ids = torch.randint(0, vocabulary, (batch, length))
    targets = torch.randint(0, vocabulary, (batch, length))
    return Workload(
        model,
        {"ids": ids, "targets": targets},
        blocks=list(model.blocks),
        feed_forwards=[(block.feed_forward, "forward") for block in model.blocks],
        head=Head(lambda: model.hidden(ids).flatten(0, 1), model.head, targets.flatten()),
    )


def plain_blocks(layers: int = 12, width: int = 256, heads: int = 4, length: int = 576, batch: int = 1) -> Workload:
    torch.manual_seed(0)
    model = PlainBlocks(layers, width, heads)
    feed_forwards = [(block.feed_forward, "forward") for block in model.blocks]
    inputs = {"x": torch.randn(batch, length, width)}
    return Workload(model, inputs, blocks=list(model.blocks), feed_forwards=feed_forwards)
