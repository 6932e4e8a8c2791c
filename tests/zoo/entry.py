"""One model of the zoo: how to build it and what to feed it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Mask = Literal["padded", "unpadded", "absent"]
Inputs = dict[str, Any]

VOCABULARY = 97
"""Tokens of every text model; 0 pads."""
TEXT_MASKS: tuple[Mask, ...] = ("padded", "unpadded", "absent")


@dataclass(frozen=True)
class Entry:
    """A small real model with a training head, and labelled batches for it."""

    name: str
    construct: Callable[[], nn.Module]
    make_inputs: Callable[[int, int, Mask], Inputs]
    shapes: tuple[tuple[int, int], tuple[int, int]]
    """Two (batch, length) pairs; length is tokens, samples, or the side of an image."""
    masks: tuple[Mask, ...] = ("absent",)
    bar: bool = True
    """Whether the architecture is one of the named bar, or one more that is expected to work."""

    def build(self, seed: int = 0) -> nn.Module:
        """A fresh model in train mode on the CPU, fp32; the same weights for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.construct().train()

    def inputs(self, batch: int, length: int, mask: Mask = "absent", seed: int = 0) -> Inputs:
        """Keyword arguments of one training step, labels included; the same for the same arguments."""
        if mask not in self.masks:
            raise ValueError(f"{self.name} takes no {mask} mask; it takes {', '.join(self.masks)}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 + seed)
            return self.make_inputs(batch, length, mask)


def tokens(batch: int, length: int) -> torch.Tensor:
    """Token ids, int64 (batch, length), none of them the padding or a special token."""
    return torch.randint(4, VOCABULARY, (batch, length))


def attention_mask(batch: int, length: int, mask: Mask) -> torch.Tensor | None:
    """An int64 (batch, length) mask of ones whose rows end in zeros when padded; the first row stays whole."""
    if mask == "absent":
        return None
    ones = torch.ones(batch, length, dtype=torch.long)
    if mask == "padded":
        for row in range(1, batch):
            ones[row, length - 1 - row % (length // 2) :] = 0
    return ones


def with_mask(inputs: Inputs, batch: int, length: int, mask: Mask, name: str = "attention_mask") -> Inputs:
    """`inputs` and the mask under its argument name; padded tokens become 0 and padded labels -100."""
    given = attention_mask(batch, length, mask)
    if given is None:
        return inputs
    padding = given == 0
    if "input_ids" in inputs:
        inputs["input_ids"] = inputs["input_ids"].masked_fill(padding, 0)
    if inputs.get("labels") is not None and inputs["labels"].shape == padding.shape:
        inputs["labels"] = inputs["labels"].masked_fill(padding, -100)
    return {**inputs, name: given}


def causal_inputs(batch: int, length: int, mask: Mask) -> Inputs:
    """Tokens that are their own labels."""
    ids = tokens(batch, length)
    return with_mask({"input_ids": ids, "labels": ids.clone()}, batch, length, mask)


def classification_inputs(batch: int, length: int, mask: Mask) -> Inputs:
    """Tokens and one class in 0..2 for each row."""
    inputs = {"input_ids": tokens(batch, length), "labels": torch.randint(0, 3, (batch,))}
    return with_mask(inputs, batch, length, mask)


def masked_inputs(batch: int, length: int, mask: Mask) -> Inputs:
    """Tokens and labels at about a third of the positions, -100 elsewhere."""
    ids = tokens(batch, length)
    chosen = torch.rand(batch, length) < 0.35
    chosen[:, 0] = True
    return with_mask({"input_ids": ids, "labels": ids.masked_fill(~chosen, -100)}, batch, length, mask)


def image_inputs(batch: int, length: int, mask: Mask) -> Inputs:
    """Square images, float32 (batch, 3, length, length), and one class in 0..2 for each."""
    return {"pixel_values": torch.randn(batch, 3, length, length), "labels": torch.randint(0, 3, (batch,))}
