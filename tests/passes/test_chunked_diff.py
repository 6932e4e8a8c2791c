"""The diff of chunked models: golden text, and the bytes of each pass."""

from __future__ import annotations

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from transformers import LlamaConfig, LlamaForCausalLM

import rewrite
from rewrite import pipeline, registry, spec
from rewrite.report.diff import diff_lines
from rewrite.text import program_text
from tests.cases.test_chunking import batch, llama
from tests.passes.test_checkpoint import TextFile

SPECS = {"chunk-ffn": "chunk-ffn{chunks=4}", "chunk-loss": "chunk-loss{chunks=4}"}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", SPECS)
def test_program(name: str, snapshot: SnapshotAssertion) -> None:
    program = rewrite.capture(llama(), batch())
    result = pipeline.run(program, spec.parse(SPECS[name], registry.load))
    assert program_text(result.program) + "\n" == snapshot.use_extension(TextFile)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", [*SPECS, "both"])
def test_diff(name: str, snapshot: SnapshotAssertion) -> None:
    text = SPECS.get(name, ",".join([*SPECS.values(), "checkpoint"]))
    diff = rewrite.diff(llama(), text, batch(4, 128), optimizer="adamw", name="llama")
    lines = "\n".join(line.plain.rstrip() for line in diff_lines(diff, 80))
    assert lines + "\n" == snapshot.use_extension(TextFile)


@pytest.mark.sweep
def test_both_passes_have_their_bytes_in_one_diff_of_the_default_llama() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig())
    ids = torch.zeros(1, 8192, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    diff = rewrite.diff(model, "chunk-ffn,chunk-loss,checkpoint", inputs, optimizer="adamw")
    hunks = {hunk.class_name: hunk for hunk in diff.hunks}
    assert {"LlamaForCausalLM", "LlamaDecoderLayer"} <= hunks.keys()
    assert hunks["LlamaForCausalLM"].after_bytes < hunks["LlamaForCausalLM"].before_bytes
    labels = [line.label for hunk in diff.hunks for line in hunk.lines]
    assert any("chunk_ffn" in label for label in labels)
    assert any("chunk_loss" in label for label in labels)
    assert diff.after.peak_bytes < 0.65 * diff.before.peak_bytes
