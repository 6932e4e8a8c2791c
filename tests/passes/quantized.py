"""Models with frozen weights, LoRA on top, and the ordinary models that compute the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

Inputs = dict[str, torch.Tensor]


def bert(*, width: int = 128) -> BertForSequenceClassification:
    """Two layers, dropout on, the encoder frozen."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=99, hidden_size=width, num_hidden_layers=2, num_attention_heads=4, intermediate_size=2 * width,
        max_position_embeddings=64,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    model.bert.encoder.requires_grad_(False)
    return model


def llama() -> LlamaForCausalLM:
    """Two layers, everything frozen."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=256, max_position_embeddings=64, attention_dropout=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).requires_grad_(False)


def tokens(seed: int = 1, size: int = 3, length: int = 12, *, every: bool = False) -> Inputs:
    """Ids and a label each, or labels for all of them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 99, (size, length), generator=generator)
    return {"input_ids": ids, "labels": ids if every else torch.randint(0, 2, (size,), generator=generator)}


def with_lora(model: nn.Module, targets: list[str], task: str | None = None) -> nn.Module:
    """The model in peft's wrapper, with adapters whose every gradient is non-zero."""
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.1, task_type=task)
    wrapped: nn.Module = peft.get_peft_model(model, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:  # zero to begin with: then no gradient would reach lora_A
            nn.init.normal_(parameter, std=0.02)
    return wrapped


def with_stored_weights(original: nn.Module, quantized: nn.Module) -> nn.Module:
    """A copy of `original` with ordinary layers that hold the weights the quantized ones compute with."""
    made = copy.deepcopy(original)
    layers = {path: layer for path, layer in quantized.named_modules() if hasattr(layer, "stored_bits")}
    assert layers
    for path, layer in layers.items():
        parent, _, name = path.rpartition(".")
        made.get_submodule(parent)._modules[name] = copy.deepcopy(layer.reference())
    return made


def step(model: nn.Module, inputs: Inputs, seed: int = 3) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one step; the model is left without them."""
    torch.manual_seed(seed)
    loss = model(**inputs).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), found


def assert_same_step(one: nn.Module, other: nn.Module, inputs: Inputs, bound: float = 0.0) -> dict[str, torch.Tensor]:
    """The same loss and gradients, within `bound` of the largest of all; returns the gradients."""
    (loss, ours), (other_loss, theirs) = step(one, inputs), step(other, inputs)
    assert ours.keys() == theirs.keys()
    assert ours
    assert torch.allclose(loss, other_loss, rtol=bound, atol=0)
    largest = max(float(grad.abs().max()) for grad in ours.values())
    for name, grad in ours.items():
        assert (grad - theirs[name]).abs().max() <= bound * largest, name
    return ours


def weight_bytes(model: nn.Module, kinds: type | tuple[type, ...]) -> int:
    """Of the parameters and buffers of the layers of these classes."""
    layers = [layer for layer in model.modules() if isinstance(layer, kinds)]
    return sum(tensor.nbytes for layer in layers for tensor in (*layer.parameters(), *layer.buffers()))


def each(model: nn.Module, action: Callable[[str, nn.Module], Any]) -> None:
    """Do something with each quantized layer."""
    for path, layer in model.named_modules():
        if hasattr(layer, "stored_bits"):
            action(path, layer)
