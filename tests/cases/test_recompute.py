"""Reports of recomputation that gave other numbers, or saved nothing without a word."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import rewrite
from passes import Checkpoint
from tests.promises.pairs import names
from tests.zoo import ZOO
from tests.zoo.compare import assert_equal, run

POLICIES = [Checkpoint(policy="blocks"), Checkpoint(policy="sqrt")]
policies = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.policy)


class TanhDropout(nn.Module):
    """`dropout(tanh(x @ W.T))`, whose mask can be read off its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.dropout(torch.tanh(hidden @ self.weight.T), 0.5, self.training)


class Stack(nn.Module):
    """Blocks in a list, one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@policies
def test_a_recomputed_dropout_keeps_its_mask(policy: Checkpoint) -> None:
    """pytorch/pytorch#190758, openai/guided-diffusion#167: a fresh mask is drawn in the recompute."""
    torch.manual_seed(0)
    hidden = torch.randn(64, 32, requires_grad=True)
    model = Stack(TanhDropout(32), TanhDropout(32))
    small = rewrite.optimize(model, passes=[policy], example_inputs=hidden)
    first, second = (block.weight.detach() for block in model.blocks)
    inner = []
    small.blocks[0].register_forward_hook(lambda _, __, output: inner.append(output.detach()))
    output = small(hidden)
    torch.manual_seed(99)
    output.sum().backward()
    tanh = torch.tanh(inner[0] @ second.T)
    back = ((1 - tanh**2) * (output != 0) * 2) @ second
    tanh = torch.tanh(hidden.detach() @ first.T)
    assert len(inner) == 1
    assert torch.allclose(hidden.grad, (back * (1 - tanh**2) * (inner[0] != 0) * 2) @ first, atol=1e-5)


@policies
def test_rrelu_in_a_recomputed_block_stores_no_noise(policy: Checkpoint) -> None:
    """pytorch/pytorch#193671: RReLU last in a recomputed span stores noise, gradients of 1e38."""
    torch.manual_seed(0)
    model = Stack(*(nn.Sequential(nn.Linear(16, 16), nn.RReLU()) for _ in range(3)))
    hidden = torch.randn(4, 16)
    small = rewrite.optimize(model, passes=[policy], example_inputs=hidden)
    for seed in (0, 1):
        assert_equal(_summed(model, hidden, seed), _summed(small, hidden, seed))


def _summed(model: nn.Module, hidden: torch.Tensor, seed: int) -> object:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.inner(hidden).pow(2).mean()

    return run(Loss(), {"hidden": hidden}, seed)


@policies
def test_batch_statistics_are_updated_once(policy: Checkpoint) -> None:
    """pytorch/pytorch#96136, facebookresearch/fairscale#1035: batch norm statistics are updated twice."""
    entry = ZOO["plain-resnet"]
    inputs = entry.inputs(*entry.shapes[0])
    model, reference = entry.build(), entry.build()
    small = rewrite.optimize(model, passes=[policy], example_inputs=inputs)
    for module in (reference, small):
        torch.manual_seed(0)
        module(**inputs).backward()
    for name, buffer in small.named_buffers():
        assert torch.equal(buffer, dict(reference.named_buffers())[name]), name
        if name.endswith("num_batches_tracked"):
            assert buffer.item() == 1, name


@policies
@names("bert", "plain-branching", sweep=("gpt2", "t5"))
def test_frozen_embeddings_still_train_the_rest(policy: Checkpoint, name: str) -> None:
    """huggingface/transformers#21381, #23170: frozen embeddings then recompute, and no gradient at all."""
    entry = ZOO[name]
    model = entry.build()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.requires_grad_(False)
    inputs = entry.inputs(*entry.shapes[0], entry.masks[0])
    small = rewrite.optimize(model, passes=[policy], example_inputs=inputs)
    expected, found = run(model, inputs, 1), run(small, inputs, 1)
    assert_equal(expected, found)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen
    assert sum(grad is not None for grad in found.grads.values()) > 5


class Growing(nn.Module):
    """A block that appends its keys to a cache it is given, and attends over all of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.keys = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, cache: dict[int, torch.Tensor], layer: int) -> torch.Tensor:
        keys = self.keys(hidden)
        keys = torch.cat([cache[layer], keys], 1) if layer in cache else keys
        cache[layer] = keys
        weights = (hidden @ keys.transpose(1, 2)).softmax(-1)
        return hidden + self.out(weights @ keys)


class GrowingModel(nn.Module):
    """Blocks that share one cache, made anew for each call; returns a loss and the cache's lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Growing(8) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        cache: dict[int, torch.Tensor] = {}
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, cache, layer)
        return hidden.pow(2).mean(), list(cache.values())


@policies
def test_a_cache_does_not_grow_twice(policy: Checkpoint) -> None:
    """shihao1895/MemoryVLA#18, huggingface/transformers#28056: the sequence doubles in the recompute."""
    model, inputs = GrowingModel(), {"hidden": torch.randn(2, 5, 8)}
    small = rewrite.optimize(model, passes=[policy], example_inputs=inputs)
    found = run(small, inputs)
    assert_equal(run(model, inputs), found)
    assert {tuple(found.outputs[f"1.{layer}"].shape) for layer in range(3)} == {(2, 5, 8)}


@policies
@names("gpt2", sweep=("llama", "t5", "gemma2"))
def test_the_cache_of_a_language_model_keeps_its_length(policy: Checkpoint, name: str) -> None:
    """huggingface/transformers#28056: `use_cache=True` with recomputation; the cache comes back as it was."""
    entry = ZOO[name]
    model, inputs = entry.build(), entry.inputs(*entry.shapes[0], entry.masks[0])
    small = rewrite.optimize(model, passes=[policy], example_inputs=inputs)
    small(**inputs, use_cache=True).loss.backward()
    lengths = {name: tensor.shape for name, tensor in run(model, {**inputs, "use_cache": True}).outputs.items()}
    assert {name: tensor.shape for name, tensor in run(small, {**inputs, "use_cache": True}).outputs.items()} == lengths
    assert any("keys" in name for name in lengths)


def test_a_selector_that_matches_nothing_raises() -> None:
    """pytorch/pytorch#176065: a policy that names what is not there does nothing, silently."""
    entry = ZOO["bert"]
    with pytest.raises(rewrite.RewriteError, match=r"no\.such\.block"):
        rewrite.optimize(
            entry.build(),
            passes=[Checkpoint(select="no.such.block.*")],
            example_inputs=entry.inputs(*entry.shapes[0], "padded"),
        )


class Asking(nn.Module):
    """A block that asks a tensor for a number, which no graph can hold."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = functional.gelu(self.up(hidden))
        scale = float(inner.detach().abs().max().item())
        return hidden + self.down(inner / (1 + scale))


@policies
def test_saved_bytes_do_not_rise_where_a_block_falls_back(policy: Checkpoint) -> None:
    """Lightning-AI/lightning-thunder#2527: recomputation is lost where a region fell back."""
    model, hidden = Stack(*(Asking(16) for _ in range(4))), torch.randn(64, 16)
    small = rewrite.optimize(model, passes=[policy], example_inputs=hidden)
    assert_equal(_summed(model, hidden, 0), _summed(small, hidden, 0))
    assert saved_bytes(small, hidden) <= saved_bytes(model, hidden)


@policies
def test_recomputed_blocks_save_less(policy: Checkpoint) -> None:
    """pytorch/pytorch#147449: checkpointing that does not lower what is held; here it must."""
    entry = ZOO["bert"]
    model, inputs = entry.build(), entry.inputs(*entry.shapes[0], "padded")
    small = rewrite.optimize(model, passes=[policy], example_inputs=inputs)
    assert saved_bytes(small, inputs) < 0.6 * saved_bytes(model, inputs)


def saved_bytes(model: nn.Module, inputs: object) -> int:
    """Bytes of the distinct storages that autograd holds after a forward, parameters and buffers excluded."""
    held: dict[int, torch.UntypedStorage] = {}
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    assert output is not None
    return sum(storage.nbytes() for storage in held.values())
