"""Partly frozen models, and what their steps run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification

from tests.zoo.compare import loss_of

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")


def bert(layers: int = 4, frozen: int = 2, width: int = 32) -> BertForSequenceClassification:
    """A small BERT with a classifier, in train mode, its embeddings and first layers frozen."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=120, hidden_size=width, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=2 * width
    )
    model = BertForSequenceClassification(config)
    if frozen:
        model.bert.embeddings.requires_grad_(False)
    for layer in model.bert.encoder.layer[:frozen]:
        layer.requires_grad_(False)
    return model.train()


def batch(rows: int = 3, length: int = 12) -> dict[str, torch.Tensor]:
    """Padded inputs with labels for `bert`."""
    generator = torch.Generator().manual_seed(rows * length)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    return {
        "input_ids": torch.randint(0, 120, (rows, length), generator=generator),
        "attention_mask": mask,
        "labels": torch.arange(rows) % 2,
    }


def step_flops(model: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Floating point operations of one forward and backward, as torch counts them while they run."""
    with FlopCounterMode(display=False) as counter:
        loss_of(model(**inputs)).backward()
    return int(counter.get_total_flops())


class _Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in PRODUCTS:
            self.modes.append(torch.is_grad_enabled())
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def products() -> Iterator[list[bool]]:
    """For each matrix product that runs within, whether gradients were enabled."""
    with _Products() as mode:
        yield mode.modes


@contextlib.contextmanager
def linear_calls() -> Iterator[list[nn.Module]]:
    """The `nn.Linear` layers that run within, once for each call."""
    called: list[nn.Module] = []
    original = nn.Linear.forward

    def forward(self: nn.Linear, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, FakeTensor):  # of a capture
            called.append(self)
        return original(self, value)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nn.Linear, "forward", forward)
        yield called
