"""Reports of recomputation that does not lower the peak: the diff says where the peak is, and what is to be gained."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import rewrite
from rewrite.memory import estimate_step
from rewrite.report.diff import summary_lines
from tests.cases.recomputed import SPECS, assert_recomputed, saved_bytes
from tests.zoo.plain import GatedBlock

specs = pytest.mark.parametrize("spec", SPECS)


class LanguageModel(nn.Module):
    """An embedding, blocks, a head and the loss over the tokens themselves."""

    def __init__(self, width: int, vocabulary: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(GatedBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def told(diff: rewrite.GraphDiff) -> str:
    return "\n".join(str(line) for line in summary_lines(diff, 100))


def assert_predicted(diff: rewrite.GraphDiff, model: nn.Module, spec: str, inputs: torch.Tensor) -> None:
    """Both peaks are those of a step on real tensors."""
    small = rewrite.optimize(model, spec, example_inputs=inputs)
    for module, estimate in ((model, diff.before), (small, diff.after)):
        real = estimate_step(module, inputs, optimizer=estimate.optimizer, real=True)
        assert real.peak_bytes == pytest.approx(estimate.peak_bytes, rel=0.01)
    assert saved_bytes(small, inputs) < saved_bytes(model, inputs)


@pytest.mark.thinned(2)
@specs
def test_a_peak_in_the_head_is_said_to_be_there(spec: str) -> None:
    """pytorch/pytorch#147449, NVIDIA/Megatron-LM#1300: the logits make the peak, and recomputed blocks leave it."""
    model, tokens = LanguageModel(32, 4000, 3), torch.randint(0, 4000, (4, 32))
    diff = rewrite.diff(model, spec, tokens)
    assert diff.before.peak.node == diff.after.peak.node == "cross_entropy"
    assert diff.after.peak.phase == "backward"
    assert diff.after.peak.largest[0].shape == (4 * 32, 4000)
    assert -0.1 * diff.before.peak_bytes < diff.peak_delta_bytes <= 0
    assert "in backward, cross_entropy" in told(diff)
    assert_predicted(diff, model, spec, tokens)


@pytest.mark.thinned(2)
@specs
def test_a_peak_in_the_optimizer_is_said_to_be_there(spec: str) -> None:
    """pytorch/pytorch#147449: parameters and their states make the peak; recomputing gains nothing."""
    model, tokens = LanguageModel(128, 50, 4), torch.randint(0, 50, (1, 4))
    diff = rewrite.diff(model, spec, tokens, optimizer="adamw")
    assert diff.modified
    assert diff.after.peak.phase == "optimizer"
    assert diff.peak_delta_bytes == 0
    assert diff.after.saved_bytes < diff.before.saved_bytes
    assert "in optimizer" in told(diff)
    assert "+0 B" in told(diff)
    assert_predicted(diff, model, spec, tokens)


class Giant(nn.Module):
    """All of the model in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([GatedBlock(64)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](hidden).sum()


def test_a_peak_in_one_giant_block_is_said_to_be_there() -> None:
    """NVIDIA/Megatron-LM#1300: one block is recomputed as a whole, and its backward holds what the forward did."""
    model, hidden = Giant(), torch.randn(64, 128, 64)
    diff = rewrite.diff(model, "checkpoint", hidden)
    assert diff.after.saved_bytes < 0.3 * diff.before.saved_bytes
    assert diff.after.peak_bytes > 0.75 * diff.before.peak_bytes
    assert diff.after.peak.phase == "backward"
    assert diff.after.peak.module_path.startswith("blocks.0")
    assert "in backward, blocks.0" in told(diff)
    assert_predicted(diff, model, "checkpoint", hidden)


@pytest.mark.thinned(2)
@specs
def test_deep_stacks_gain_what_is_said(spec: str) -> None:
    """pytorch/pytorch#147449: where recomputation does lower the peak, it is by as much as predicted."""
    model, tokens = LanguageModel(32, 60, 9), torch.randint(0, 60, (16, 32))
    diff = rewrite.diff(model, spec, tokens)
    assert_recomputed(rewrite.optimize(model, spec, example_inputs=tokens), "blocks.0", "blocks.8")
    assert diff.peak_delta_bytes < -0.4 * diff.before.peak_bytes
    assert_predicted(diff, model, spec, tokens)
