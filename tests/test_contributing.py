"""The worked example in CONTRIBUTING is a pass that loads, rewrites a real model and keeps its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import rewrite
from rewrite import registry
from tests.documents import marked_block

DOCUMENT = ".github/CONTRIBUTING.md"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example as a third party's distribution, with the entry point the document shows."""
    (tmp_path / "checkpoint_tail.py").write_text(marked_block(DOCUMENT, "checkpoint_tail.py"))
    header, line = marked_block(DOCUMENT, "entry point").strip().split("\n")
    assert header == '[project.entry-points."rewrite.passes"]'
    info = tmp_path / "checkpoint_tail-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: checkpoint-tail\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rewrite.passes]\n{line.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_the_example_pass_is_described_by_its_docstrings() -> None:
    about = registry.describe("checkpoint-tail")

    assert about.fault == ""
    assert about.summary == "Recompute the last blocks in the backward."
    assert [(option.name, option.doc) for option in about.options] == [("blocks", "How many, counted from the end.")]


@pytest.mark.usefixtures("installed")
def test_the_example_pass_saves_bytes_and_keeps_every_number() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 128}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=100))
    ids = torch.randint(0, 100, (2, 16))
    batch = {"input_ids": ids, "labels": ids}

    small = rewrite.optimize(model, passes="checkpoint-tail{blocks=2}", example_inputs=batch)

    assert rewrite.verify(model, small, batch).passed
    one = rewrite.optimize(model, passes="checkpoint-tail", example_inputs=batch)
    saved = [rewrite.estimate(module, batch).saved_bytes for module in (model, one, small)]
    assert saved == sorted(saved, reverse=True)
    assert len(set(saved)) == 3


@pytest.mark.usefixtures("installed")
def test_the_example_pass_refuses_a_model_without_repeated_blocks() -> None:
    model = torch.nn.Linear(4, 4)

    result = rewrite.optimize(model, passes="checkpoint-tail", example_inputs=torch.ones(2, 4))

    (refusal,) = rewrite.report(result).refusals
    assert refusal.reason == "no block of this model repeats"
