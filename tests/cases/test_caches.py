"""Reports of a key-value cache that grew again in the recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import rewrite
from tests.cases.recomputed import SPECS, assert_recomputed, recomputed
from tests.promises.pairs import names
from tests.zoo import ZOO
from tests.zoo.compare import assert_equal, run

specs = pytest.mark.parametrize("spec", SPECS)
WIDTH, LENGTH = 8, 5


class Growing(nn.Module):
    """A block that appends its keys to a cache it is given, and attends over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, cache: Any, layer: int) -> torch.Tensor:
        keys = self.append(self.keys(hidden), cache, layer)
        weights = (hidden @ keys.transpose(1, 2)).softmax(-1)
        return hidden + self.out(weights @ keys)

    def append(self, keys: torch.Tensor, cache: Any, layer: int) -> torch.Tensor:
        cache[layer] = torch.cat([cache[layer], keys], 1) if layer in cache else keys
        return cache[layer]


class GrowingCache(Growing):
    """The same with a cache of transformers."""

    def append(self, keys: torch.Tensor, cache: Any, layer: int) -> torch.Tensor:
        grown, _ = cache.update(keys[:, None], keys[:, None], layer)
        return grown[:, 0]


class Model(nn.Module):
    """Blocks that share the cache they are given; returns the mean square."""

    def __init__(self, kind: type[Growing]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, hidden: torch.Tensor, cache: Any) -> torch.Tensor:
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, cache, layer)
        return hidden.pow(2).mean()


def lengths(cache: Any) -> list[int]:
    """Length of each layer's keys."""
    if isinstance(cache, dict):
        return [keys.shape[1] for keys in cache.values()]
    return [layer.keys.shape[2] for layer in cache.layers]


@pytest.mark.thinned(4)
@specs
@pytest.mark.parametrize(("kind", "make"), [(Growing, dict), (GrowingCache, DynamicCache)], ids=["dict", "cache"])
def test_a_cache_does_not_grow_in_the_recompute(kind: type[Growing], make: type, spec: str) -> None:
    """shihao1895/MemoryVLA#18: the sequence doubles in the recompute, and again at each step."""
    model, hidden = Model(kind), torch.randn(2, LENGTH, WIDTH)
    small = rewrite.optimize(model, spec, example_inputs=(hidden, make()))
    expected, found = make(), make()
    for step in (1, 2):
        assert_equal(
            run(model, {"hidden": hidden, "cache": expected}), run(small, {"hidden": hidden, "cache": found})
        )  # the second step goes back through what the first put into the cache
        assert lengths(found) == lengths(expected) == [step * LENGTH] * 3
        expected, found = _detached(expected), _detached(found)


def _detached(cache: Any) -> Any:
    """The cache without its graph: each step goes back through its own part."""
    if isinstance(cache, dict):
        return {layer: keys.detach() for layer, keys in cache.items()}
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
    return cache


@pytest.mark.thinned(2)
@specs
def test_a_block_that_grows_a_cache_is_refused_before_training(spec: str) -> None:
    """shihao1895/MemoryVLA#18, huggingface/transformers#28056: told by an error of shapes, deep in the backward."""
    small = rewrite.optimize(Model(Growing), spec, example_inputs=(torch.randn(2, LENGTH, WIDTH), {}))
    told = rewrite.report(small)
    refused = {entry.path: entry for entry in told.opaque}
    for layer in range(3):
        assert refused[f"blocks.{layer}"].reason == "its forward changes a list, dict or record that it is given"
        assert refused[f"blocks.{layer}"].source.startswith("test_caches.py:")
    assert not recomputed(small)
    assert [refusal.path for refusal in told.refusals] == [""]


@pytest.mark.thinned(2)
@specs
@names("gpt2", sweep=("llama", "t5", "gemma2"))
def test_the_cache_of_a_language_model_keeps_its_length(spec: str, name: str) -> None:
    """huggingface/transformers#28056: `use_cache=True` with recomputation."""
    entry = ZOO[name]
    model, inputs = entry.build(), entry.inputs(*entry.shapes[0], entry.masks[0])
    small = rewrite.optimize(model, spec, example_inputs={**inputs, "use_cache": True})
    assert_recomputed(small, "*.[0-9]*")
    assert_equal(run(model, {**inputs, "use_cache": True}), run(small, {**inputs, "use_cache": True}))
    output = small(**inputs, use_cache=True)
    before = output.past_key_values.get_seq_length()
    output.loss.backward()
    assert output.past_key_values.get_seq_length() == before == inputs["labels"].shape[1]
