"""Reports of chunked feed-forward parts and losses, replayed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import rewrite
from passes import ChunkFFN, ChunkLoss
from tests.passes.test_chunk_loss import assert_close

VOCABULARY = 2048


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def batch(rows: int = 2, length: int = 64) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(rows + length))
    return {"input_ids": ids, "labels": ids.clone()}


def step(model: nn.Module, inputs: dict[str, torch.Tensor], **more: object) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(**inputs, **more).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_gradients_with_every_count_of_chunks(chunks: int) -> None:
    """axolotl-ai-cloud/axolotl#3666, #3116: stacked hooks and scaling by 1/N, gradients 2 to 2.5 times as large."""
    model = llama()
    passes = [ChunkFFN(chunks=chunks), ChunkLoss(chunks=chunks)]
    small = rewrite.optimize(model, passes=passes, example_inputs=batch())
    assert len(rewrite.report(small).steps[0].result.changes) == 1
    assert len(rewrite.report(small).steps[1].result.changes) == 1
    assert_close(step(model, batch()), step(small, batch()), 2e-6)


def test_masked_labels_a_masked_chunk_and_a_short_one() -> None:
    """deepspeedai/DeepSpeed#8587, axolotl-ai-cloud/axolotl#2865: a mean of means is off, or NaN."""
    model = llama()
    small = rewrite.optimize(model, passes=[ChunkLoss(chunks=4)], example_inputs=batch())
    inputs = batch(2, 61)
    inputs["labels"][:, ::3] = -100
    inputs["labels"][0, :40] = -100  # the first of four chunks, whole
    expected, found = step(model, inputs), step(small, inputs)
    assert not found["loss"].isnan()
    assert_close(expected, found, 2e-6)


def test_a_count_of_items_from_outside() -> None:
    """As transformers' Trainer gives it for gradient accumulation: a tensor, or a number."""
    model = llama()
    for count in (torch.tensor(100), 77):
        small = rewrite.optimize(
            model, passes=[ChunkLoss(chunks=4)], example_inputs={**batch(), "num_items_in_batch": count}
        )
        assert rewrite.report(small).changes
        expected = step(model, batch(), num_items_in_batch=count)
        assert_close(expected, step(small, batch(), num_items_in_batch=count), 2e-6)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_logits_are_never_held(dtype: torch.dtype) -> None:
    """huggingface/transformers#6366, #41306: logits of every position, in single precision."""
    model, inputs = llama(dtype), batch(4, 256)
    small = rewrite.optimize(model, passes=[ChunkLoss(chunks=16)], example_inputs=inputs)
    before, after = (rewrite.estimate(each, inputs) for each in (model, small))
    assert before.peak_bytes - after.peak_bytes > 2 * 4 * 256 * VOCABULARY * 4
    assert all(held.shape[-1:] != (VOCABULARY,) or held.bytes < 4 * 256 * VOCABULARY for held in after.peak.largest)


def test_no_chunks_where_they_save_nothing() -> None:
    """modelscope/ms-swift#7090: below some thousand tokens, tiling cost time and memory."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 4)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(self.head(x), labels)

    inputs = {"x": torch.randn(8, 64), "labels": torch.randint(0, 4, (8,))}
    report = rewrite.report(rewrite.optimize(Classifier(), passes=[ChunkLoss()], example_inputs=inputs))
    assert not report.changes
    (refusal,) = report.refusals
    assert "it saves nothing with so few rows or classes" in refusal.reason


def test_chunking_of_transformers_saves_nothing_and_ours_does() -> None:
    """`chunk_size_feed_forward` in training: what every chunk makes is held until the backward."""

    def bert(size: int) -> BertForMaskedLM:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            chunk_size_feed_forward=size,
        )  # fmt: skip
        return BertForMaskedLM(config)

    ids = torch.randint(0, 97, (2, 128))
    inputs = {"input_ids": ids, "labels": ids}
    theirs = rewrite.estimate(bert(64), inputs).saved_bytes
    assert theirs == rewrite.estimate(bert(0), inputs).saved_bytes
    small = rewrite.optimize(bert(64), passes=[ChunkFFN(chunks=2)], example_inputs=inputs)
    assert rewrite.estimate(small, inputs).saved_bytes < theirs
    (refusal,) = rewrite.report(small).refusals
    assert refusal.reason.startswith("chunk_size_feed_forward=64 in the config saves 0 bytes in training, as autograd ")
    assert_close(step(bert(64), inputs), step(small, inputs), 2e-6)
