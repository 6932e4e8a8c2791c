"""Small models that overflow, or lose what matters, when they are cast to half precision without thought."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional


class Scores(nn.Module):
    """Products of queries and keys that do not fit in fp16 before they are scaled."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.masked = masked
        with torch.no_grad():
            for each in (self.query, self.key):
                each.weight.copy_(torch.eye(64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = self.query(hidden) @ self.key(hidden).transpose(-1, -2) / math.sqrt(64)
        if self.masked:
            keep = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril(-1)  # the first row: none
            scores = scores + (1.0 - keep.to(scores.dtype)) * torch.finfo(scores.dtype).min
        return torch.softmax(scores, dim=-1) @ self.value(hidden)


class Filled(nn.Module):
    """Scores filled with the least fp32 number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores = self.inner(hidden) @ hidden.transpose(-1, -2)
        keep = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril(-1)
        return scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(-1) @ hidden


class HandwrittenNorm(nn.Module):
    """RMSNorm by hand between two products; its squares are 90,000."""

    def __init__(self, eps: float = 1e-6, width: int = 64) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        variance = (hidden * hidden).mean(-1, keepdim=True)
        return self.last(self.weight * (hidden / torch.sqrt(variance + self.eps)))


class MeanPool(nn.Module):
    """The mean over a mask, kept from dividing by nothing with 1e-9."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        keep = torch.zeros((*hidden.shape[:2], 1))
        keep[1:] = 1.0
        total = (self.first(hidden) * keep).sum(1)
        return self.last(total / torch.clamp(keep.sum(1), min=1e-9))


class LongSum(nn.Module):
    """A sum of 70,000 ones that a product made."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 1, bias=False)
        nn.init.constant_(self.first.weight, 0.25)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.first(hidden).sum(1)


class WrittenGELU(nn.Module):
    """GELU by its tanh formula, whose cube of 50 is 125,000."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = self.first(hidden)
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return self.last(0.5 * x * (1 + torch.tanh(inner)))


class LargeLogits(nn.Module):
    """Logits of 70,000 that come out of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 32, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(32, 64) * 70_000 / 300)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        return functional.cross_entropy(logits.flatten(0, 1), torch.arange(logits.shape[:2].numel()) % 32)


class Router(nn.Module):
    """The two experts of 64 that each token goes to, as a mask that nothing rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + 0.0 * self.inner(hidden)
        weights, chosen = torch.topk(torch.softmax(self.gate(hidden), -1), 2, dim=-1)
        return torch.zeros(*hidden.shape[:-1], 64).scatter(-1, chosen, weights)


def normal(rows: int = 4, length: int = 8, width: int = 64, scale: float = 1.0) -> torch.Tensor:
    """Numbers from a normal distribution, of shape (rows, length, width)."""
    return scale * torch.randn(rows, length, width, generator=torch.Generator().manual_seed(3))
