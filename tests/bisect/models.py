"""Small models with a part whose values do not fit in fp16."""

from __future__ import annotations

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

BIAS = 3000.0


def hot_bert(hot: tuple[int, ...] = (1,), layers: int = 2) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small BERT whose feed-forward parts overflow fp16 in the layers `hot`, and a batch of it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
    model = BertForMaskedLM(BertConfig(num_hidden_layers=layers, **sizes))
    with torch.no_grad():
        for layer in hot:
            model.bert.encoder.layer[layer].intermediate.dense.bias[0] = BIAS
            model.bert.encoder.layer[layer].output.dense.weight[0] = 30.0
    ids = torch.randint(0, 100, (2, 8), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids.clone()}


def cool_bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The same without such a part."""
    return hot_bert(())


class Block(nn.Module):
    """A feed-forward part behind a norm, with a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Stack(nn.Module):
    """Blocks in a row, and a norm."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden)


def hot_stack(hot: tuple[int, ...] = (1,), layers: int = 3) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Blocks of which those numbered `hot` give 90,000, and a batch of eight rows."""
    torch.manual_seed(0)
    model = Stack(layers)
    with torch.no_grad():
        for number in hot:
            model.blocks[number].up.bias[0] = BIAS
            model.blocks[number].down.weight[0, 0] = 30.0
    return model, {"hidden": torch.randn(8, 16, generator=torch.Generator().manual_seed(1))}
