"""Models of plain torch, without transformers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tests.zoo.entry import TEXT_MASKS, VOCABULARY, Entry, Inputs, Mask, attention_mask, image_inputs, tokens


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation and a skip; `stride` 2 halves the side and adds a projection."""

    def __init__(self, width_in: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))
            if stride != 1 or width_in != width
            else None
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        skip = hidden if self.shortcut is None else self.shortcut(hidden)
        hidden = functional.relu(self.first_norm(self.first(hidden)), inplace=True)
        hidden = self.second_norm(self.second(hidden))
        hidden += skip
        return functional.relu(hidden)


class ResidualNetwork(nn.Module):
    """A small ResNet: three stages of three basic blocks, dropout before the head; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.stages = nn.ModuleList(
            nn.Sequential(BasicBlock(width_in, width, stride), BasicBlock(width, width), BasicBlock(width, width))
            for width_in, width, stride in ((8, 8, 1), (8, 16, 2), (16, 32, 2))
        )
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(32, 3)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(pixel_values)
        for stage in self.stages:
            hidden = stage(hidden)
        pooled = self.dropout(hidden.mean((2, 3)))
        return functional.cross_entropy(self.head(pooled), labels)


class DoubleConvolution(nn.Module):
    """Two convolutions, each with group normalisation and SiLU, and channel dropout between them."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width_in, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.Dropout2d(0.1),
            nn.Conv2d(width, width, 3, padding=1),
            nn.GroupNorm(4, width),
            nn.SiLU(),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layers(hidden)


class SkipNetwork(nn.Module):
    """An encoder-decoder whose decoder concatenates the encoder's values; returns a dict with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.ModuleList([DoubleConvolution(8, 8), DoubleConvolution(8, 8), DoubleConvolution(8, 8)])
        self.bottom = nn.Sequential(*(DoubleConvolution(8, 8) for _ in range(2)))
        self.up = nn.ModuleList([DoubleConvolution(16, 8) for _ in range(3)])
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.stem(pixel_values)
        skips = []
        for block in self.down:
            hidden = block(hidden)
            skips.append(hidden)
            hidden = functional.max_pool2d(hidden, 2)
        hidden = self.bottom(hidden)
        for block in self.up:
            skip = skips.pop()
            hidden = functional.interpolate(hidden, size=skip.shape[-2:], mode="bilinear", align_corners=False)
            hidden = block(torch.cat([hidden, skip], dim=1))
        logits = self.head(hidden)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class GatedBlock(nn.Module):
    """A residual feed-forward block with dropout, layer normalisation first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(self.down(functional.gelu(self.up(self.norm(hidden)))))


class BranchingBlock(GatedBlock):
    """A gated block that halves its values when their mean square is large: a branch that depends on data."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.pow(2).mean() > 1.0:
            hidden = hidden * 0.5
        return super().forward(hidden)


class BranchingNetwork(nn.Module):
    """Embeds tokens, then gated blocks, a choice of branch by value, blocks that branch inside, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(GatedBlock(32) for _ in range(4))
        self.calm = nn.Linear(32, 32)
        self.wild = nn.Linear(32, 32)
        self.branching = nn.ModuleList(BranchingBlock(32) for _ in range(2))
        self.head = nn.Linear(32, 3)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.calm(hidden) if hidden.sum().item() > 0 else self.wild(hidden).tanh()
        for block in self.branching:
            hidden = block(hidden)
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None]
        return functional.cross_entropy(self.head(hidden.mean(1)), labels)


class TorchTransformer(nn.Module):
    """A model around `torch.nn.TransformerEncoder`; returns the loss and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(32, 3)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        padding = None if attention_mask is None else attention_mask == 0
        hidden = self.encoder(self.embedding(input_ids), src_key_padding_mask=padding)
        logits = self.head(hidden.mean(1))
        return functional.cross_entropy(logits, labels), logits


class Recurrent(nn.Module):
    """Two LSTM layers with dropout between them, over embedded tokens; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.lstm = nn.LSTM(24, 24, num_layers=2, dropout=0.1, batch_first=True)
        self.blocks = nn.Sequential(*(GatedBlock(24) for _ in range(2)))
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(input_ids))
        logits = self.head(self.blocks(hidden))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def segmentation_inputs(batch: int, length: int, mask: Mask) -> Inputs:
    """Images, float32 (batch, 3, length, length), and a class in 0..2 for each pixel."""
    return {
        "pixel_values": torch.randn(batch, 3, length, length),
        "labels": torch.randint(0, 3, (batch, length, length)),
    }


def row_inputs(batch: int, length: int, mask: Mask) -> Inputs:
    """Tokens, one class for each row, and a float mask when asked for."""
    inputs: Inputs = {"input_ids": tokens(batch, length), "labels": torch.randint(0, 3, (batch,))}
    given = attention_mask(batch, length, mask)
    return inputs if given is None else {**inputs, "attention_mask": given}


def next_token_inputs(batch: int, length: int, mask: Mask) -> Inputs:
    """Tokens that are their own labels."""
    ids = tokens(batch, length)
    return {"input_ids": ids, "labels": ids.clone()}


PLAIN = (
    Entry("plain-resnet", ResidualNetwork, image_inputs, ((2, 16), (3, 20))),
    Entry("plain-unet", SkipNetwork, segmentation_inputs, ((2, 16), (3, 24))),
    Entry("plain-branching", BranchingNetwork, row_inputs, ((2, 10), (3, 7)), TEXT_MASKS),
    Entry("torch-transformer", TorchTransformer, row_inputs, ((2, 10), (3, 7)), TEXT_MASKS, bar=False),
    Entry("torch-lstm", Recurrent, next_token_inputs, ((2, 10), (3, 7)), bar=False),
)
