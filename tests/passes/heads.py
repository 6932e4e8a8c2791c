"""Models that end in a head and a cross-entropy, in the ways people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, CLASSES = 8, 48


class Headed(nn.Module):
    """Hidden states from an embedding and one layer, a head, and a loss written by `finish(model, hidden, labels)`."""

    def __init__(
        self, finish: Callable[[Headed, torch.Tensor, torch.Tensor], Any], *, bias: bool = False, tied: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.finish = finish
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.2, 2.0, CLASSES), ignore_index=-1)
        self.register_buffer("class_weight", torch.linspace(0.5, 1.5, CLASSES))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.finish(self, torch.tanh(self.layer(self.embedding(ids))), labels)


def flat(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model.head(hidden).flatten(0, 1), labels.flatten())


def shifted(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model.head(hidden)
    logits = logits[..., :-1, :].contiguous().float()
    return functional.cross_entropy(logits.view(-1, CLASSES), labels[..., 1:].contiguous().view(-1))


def classes_second(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model.head(hidden).transpose(1, 2), labels)


def permuted(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model.head(hidden).permute(0, 2, 1), labels, reduction="sum")


def soft_capped(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = torch.tanh(model.head(hidden) / 3.0) * 3.0
    return functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def learned_scale(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model.head(hidden) * model.scale + model.class_weight
    return functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def smoothed(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model.head(hidden).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def weighted(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weight = model.class_weight
    return functional.cross_entropy(model.head(hidden).flatten(0, 1), labels.flatten(), weight=weight)


def weighted_and_smoothed(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        model.head(hidden).flatten(0, 1), labels.flatten(), weight=model.class_weight, label_smoothing=0.2
    )


def summed(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = functional.cross_entropy(model.head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / 17


def by_row(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = functional.cross_entropy(model.head(hidden).transpose(1, 2), labels, reduction="none")
    return (losses * torch.linspace(0, 1, losses.shape[1])).sum()


def criterion(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model.criterion(model.head(hidden).view(-1, CLASSES), labels.view(-1))


def functional_head(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = functional.linear(hidden, model.embedding.weight)
    return functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def product_head(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = hidden @ model.embedding.weight.T
    return functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def low_rank(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model.head(hidden) + 0.5 * functional.linear(model.layer(hidden), model.embedding.weight)
    return functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def used_twice(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = flat(model, hidden, labels)
    return loss + loss * loss


FINISHES = (
    flat, shifted, classes_second, permuted, soft_capped, learned_scale, smoothed, weighted, weighted_and_smoothed,
    summed, by_row, criterion, functional_head, product_head, low_rank, used_twice,
)  # fmt: skip


def batch(rows: int = 3, length: int = 7, ignored: float = 0.3, ignore_index: int = -100) -> dict[str, torch.Tensor]:
    """Ids and labels of shape (rows, length); a part of the labels is to be ignored."""
    generator = torch.Generator().manual_seed(rows * 100 + length)
    ids = torch.randint(0, CLASSES, (rows, length), generator=generator)
    labels = torch.randint(0, CLASSES, (rows, length), generator=generator)
    labels[torch.rand((rows, length), generator=generator) < ignored] = ignore_index
    return {"ids": ids, "labels": labels}
