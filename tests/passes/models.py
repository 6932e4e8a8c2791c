"""Models for tests of passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """One head, without projections out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = self.query(hidden) @ self.key(hidden).transpose(-1, -2)
        return torch.softmax(scores, dim=-1) @ self.value(hidden)


class Layer(nn.Module):
    """Attention and a feed-forward part, `widths` times as wide inside."""

    def __init__(self, width: int = 8, inner: int = 16) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Dropout(0.1), nn.Linear(inner, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(hidden)
        return hidden + self.mlp(self.norm(hidden))


class Model(nn.Module):
    """An embedding, layers and a loss over the tokens themselves."""

    def __init__(self, layers: int | Sequence[nn.Module] = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        made = [Layer() for _ in range(layers)] if isinstance(layers, int) else layers
        self.layers = nn.ModuleList(made)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class Plain(nn.Module):
    """Layers in a row with no stack among them."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(layers)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layers(hidden).pow(2).mean()


def tokens(batch: int = 3, length: int = 7) -> torch.Tensor:
    """Ids below 16 of shape (batch, length)."""
    return torch.randint(0, 16, (batch, length), generator=torch.Generator().manual_seed(1))
