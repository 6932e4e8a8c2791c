"""Policy cheap recomputes no matrix work, and no policy runs what is frozen again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import rewrite
from passes import Checkpoint
from rewrite import KEEP, KEEP_STATE


def bert() -> tuple[nn.Module, dict[str, Any]]:
    config = BertConfig(num_hidden_layers=3, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=50)
    ids = torch.randint(0, 50, (2, 24))
    return BertForSequenceClassification(config).train(), {"input_ids": ids, "labels": torch.tensor([0, 1])}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    ids = torch.randint(0, 50, (2, 24))
    return LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids, "use_cache": False}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("make", [bert, llama], ids=["bert", "llama"])
def test_cheap_saves_without_matrix_work(make: Any) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    before = rewrite.estimate(model, inputs)
    cheap = rewrite.estimate(rewrite.optimize(model, [Checkpoint("cheap")], example_inputs=inputs), inputs)
    full = rewrite.estimate(rewrite.optimize(model, [Checkpoint()], example_inputs=inputs), inputs)
    assert full.saved_bytes < cheap.saved_bytes < before.saved_bytes
    assert cheap.flops == before.flops
    assert full.flops.backward > before.flops.backward


@pytest.mark.thinned(2)
@pytest.mark.parametrize("make", [bert, llama], ids=["bert", "llama"])
def test_cheap_is_exact(make: Any) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    assert rewrite.verify(
        model, rewrite.optimize(model, "checkpoint{policy=cheap}", example_inputs=inputs), inputs
    ).passed


def test_cheap_keeps_products_attention_and_masks() -> None:
    model, inputs = bert()
    program = rewrite.report(rewrite.optimize(model, [Checkpoint("cheap")], example_inputs=inputs)).after
    assert program is not None
    block = program.region("bert.encoder.layer.0")
    kept = {node.name for node in block.nodes() if node.meta.get(KEEP)}
    states = {node.name for node in block.nodes() if node.meta.get(KEEP_STATE)}
    assert kept == {
        "attention_self_query", "attention_self_key", "attention_self_value", "scaled_dot_product_attention",
        "attention_output_dense", "intermediate_dense", "output_dense",
    }  # fmt: skip
    assert states - kept == {"attention_output_dropout", "output_dropout"}


def test_cheap_keeps_a_softmax_in_place_of_the_scores_it_is_made_from() -> None:
    """As many bytes, and neither the scores nor what lies between is computed again."""
    model, inputs = bert()
    model.set_attn_implementation("eager")  # type: ignore[operator]
    small = rewrite.optimize(model, [Checkpoint("cheap")], example_inputs=inputs)
    program = rewrite.report(small).after
    assert program is not None
    kept = {node.name for node in program.region("bert.encoder.layer.0").nodes() if node.meta.get(KEEP)}
    assert {"softmax", "matmul_1"} <= kept
    assert "matmul" not in kept
    assert rewrite.verify(model, small, inputs).passed
    assert rewrite.estimate(small, inputs).flops == rewrite.estimate(model, inputs).flops


class Adapted(nn.Module):
    """A frozen projection, an activation, another frozen projection, and a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16)
        self.first.requires_grad_(False)
        self.second.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(hidden)))))


def test_a_frozen_prefix_of_a_recomputed_block_is_not_run_again() -> None:
    """By floating point operations: the backward of the rewritten block has those of the plain one."""
    model = nn.Sequential(Adapted()).train()
    hidden = torch.randn(8, 16)
    small = rewrite.optimize(model, [Checkpoint(select="0")], example_inputs=hidden)
    assert rewrite.estimate(small, hidden).flops == rewrite.estimate(model, hidden).flops
    assert rewrite.verify(model, small, hidden).passed
