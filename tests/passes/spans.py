"""Models with feed-forward parts, in the ways people write them, and with operators in between that mix positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

WIDTH, INNER = 8, 32


class Part(nn.Module):
    """`body(model, x)` around layers of many kinds, added to its input; returns the mean of the square."""

    def __init__(self, body: Callable[[Part, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER, bias=False)
        self.both = nn.Linear(WIDTH, 2 * INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.up_rows, self.down_rows = Conv1D(INNER, WIDTH), Conv1D(WIDTH, INNER)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.batch_norm = nn.BatchNorm1d(INNER)
        self.layer_scale = nn.Parameter(torch.full((INNER,), 0.5))
        self.convolution = nn.Conv1d(INNER, INNER, 3, padding=1)
        self.attention = nn.MultiheadAttention(INNER, 2, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.router = nn.Linear(WIDTH, 4)
        self.experts_up, self.experts_down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return (x + self.body(self, x)).pow(2).mean()


def plain(part: Part, x: torch.Tensor) -> torch.Tensor:
    return part.down(functional.gelu(part.up(x)))


def normed(part: Part, x: torch.Tensor) -> torch.Tensor:
    return part.down(torch.relu(part.up(part.norm(x))))


def gated(part: Part, x: torch.Tensor) -> torch.Tensor:
    return part.down(functional.silu(part.gate(x)) * part.up(x))


def gated_in_one(part: Part, x: torch.Tensor) -> torch.Tensor:
    gate, up = part.both(x).chunk(2, dim=-1)
    return part.down(functional.silu(gate) * up * part.layer_scale)


def handwritten_norm(part: Part, x: torch.Tensor) -> torch.Tensor:
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return part.down(functional.gelu(part.up(part.scale * (x * torch.rsqrt(variance + 1e-6)))))


def transposed_layers(part: Part, x: torch.Tensor) -> torch.Tensor:
    return part.down_rows(functional.gelu(part.up_rows(x)))


def functional_layers(part: Part, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(torch.tanh(x @ part.up.weight.T), part.down.weight, part.down.bias)


def flattened(part: Part, x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return part.down(functional.gelu(part.up(rows))).view(x.shape)


def low_rank(part: Part, x: torch.Tensor) -> torch.Tensor:
    """An adapter beside the first product, as LoRA has it."""
    return part.down(functional.gelu(part.up(x) + 0.1 * part.experts_up(part.first(x))))


def not_contiguous(part: Part, x: torch.Tensor) -> torch.Tensor:
    return part.down(functional.gelu(part.up(x.transpose(0, 1)))).transpose(0, 1)


def twice(part: Part, x: torch.Tensor) -> torch.Tensor:
    """Two spans, with the same weights."""
    return plain(part, plain(part, x))


def dropped_after(part: Part, x: torch.Tensor) -> torch.Tensor:
    return part.dropout(plain(part, x))


BODIES = (
    plain, normed, gated, gated_in_one, handwritten_norm, transposed_layers, functional_layers, flattened, low_rank,
    not_contiguous, twice, dropped_after,
)  # fmt: skip


def with_batch_norm(part: Part, x: torch.Tensor) -> torch.Tensor:
    return part.down(part.batch_norm(part.up(x).transpose(1, 2)).transpose(1, 2))


def with_attention(part: Part, x: torch.Tensor) -> torch.Tensor:
    wide = part.up(x)
    return part.down(functional.scaled_dot_product_attention(wide, wide, wide))


def with_cumsum(part: Part, x: torch.Tensor) -> torch.Tensor:
    return part.down(part.up(x).cumsum(1))


def with_convolution(part: Part, x: torch.Tensor) -> torch.Tensor:
    return part.down(part.convolution(part.up(x).transpose(1, 2)).transpose(1, 2))


def with_routing(part: Part, x: torch.Tensor) -> torch.Tensor:
    """The positions that score highest, up to a capacity, go through the expert."""
    wide = part.up(x)
    chosen = wide.mean(-1).topk(2, dim=1).indices
    taken = wide.gather(1, chosen.unsqueeze(-1).expand(-1, -1, INNER))
    return part.down(taken).mean(1, keepdim=True)


def with_dropout(part: Part, x: torch.Tensor) -> torch.Tensor:
    return part.down(part.dropout(part.up(x)))


def with_norm_over_positions(part: Part, x: torch.Tensor) -> torch.Tensor:
    return part.down(functional.softmax(part.up(x), dim=1))


def inputs(rows: int = 3, length: int = 16) -> Any:
    """Of shape (rows, length, WIDTH)."""
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(rows * 100 + length))
