"""Small models to train, and steps of training."""

from __future__ import annotations

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification


def bert(*, dropout: float = 0.1) -> BertForSequenceClassification:
    """Two layers, with embeddings and matrices large enough for 8 bits."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def batch(seed: int = 1, size: int = 4, length: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, 200, (size, length), generator=generator),
        "labels": torch.randint(0, 2, (size,), generator=generator),
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The loss of each step; dropout is seeded by the step's number."""
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def moments_bits(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bits of the first moment of each parameter that has state, by name."""
    found = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            moment = next(v for k, v in optimizer.state[parameter].items() if k in ("state1", "exp_avg"))
            found[name] = 8 if moment.dtype == torch.uint8 else 32
    return found
