"""A small language model of which blocks and loss can both be chunked, and what there is to choose for a step of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import rewrite
from rewrite.contract import Numerics
from rewrite.example import Example
from rewrite.inputs import as_call
from rewrite.plan.joint import Joint

WIDTH, INNER, CLASSES = 16, 128, 512


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, inner), nn.GELU(), nn.Linear(inner, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mlp(self.norm(hidden)).softmax(-1)


class Language(nn.Module):
    """Embedding, blocks and a head with its loss over the tokens themselves."""

    def __init__(self, layers: int = 3, inner: int = INNER) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block(inner) for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def batch(rows: int = 4, length: int = 64) -> torch.Tensor:
    """Ids of shape (rows, length)."""
    return torch.randint(0, CLASSES, (rows, length), generator=torch.Generator().manual_seed(1))


def joint(model: nn.Module, inputs: Any, optimizer: str | None = None, allow: str = "reassociated") -> Joint:
    """What there is to choose for a step of a model."""
    args, kwargs = as_call(inputs)
    example = Example(model, args, kwargs, optimizer)
    program = rewrite.capture(model, inputs)
    program = replace(program, metadata={**program.metadata, "example": example})
    return Joint(program, example, allow=Numerics(allow))
