"""Text of hand-made results, at three widths, against reviewed files (`pytest --snapshot-update` writes them)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable

import pytest
from rich.text import Text
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode

from rewrite.certificate import Certificate, Row
from rewrite.diff.model import GraphDiff, Hunk, View
from rewrite.memory.timeline import Estimate
from rewrite.report.certificate import certificate_lines
from rewrite.report.diff import changed_paths, diff_lines, stat_view
from rewrite.report.documents import diff_document, document_text, plan_document, view_document
from rewrite.report.fit import fit_lines
from rewrite.report.plan import plan_lines
from rewrite.report.show import show_lines
from tests.report.records import diff, estimate, fit_table, lines, plan


class TextFile(SingleFileSnapshotExtension):
    _write_mode = WriteMode.TEXT
    file_extension = "txt"


@pytest.fixture
def golden(snapshot: SnapshotAssertion) -> SnapshotAssertion:
    return snapshot.use_extension(TextFile)


def text(told: Iterable[Text]) -> str:
    return "".join(f"{line.plain}\n" for line in told)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_diff(golden: SnapshotAssertion, width: int) -> None:
    told = text(diff_lines(diff(), width))

    assert max(map(len, told.splitlines())) <= width
    assert told == golden


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_plan(golden: SnapshotAssertion, width: int) -> None:
    told = text(plan_lines(plan(), width))

    assert plan().spec in told
    assert max(len(line) for line in told.splitlines() if not line.startswith("+++")) <= width
    assert told == golden


@pytest.mark.parametrize("width", [80, 120])
def test_sizes_that_fit(golden: SnapshotAssertion, width: int) -> None:
    told = text(fit_lines(fit_table(), width))

    assert told == golden


def test_a_plan_document_names_what_it_was_made_for() -> None:
    document = json.loads(document_text(plan_document(plan())))

    assert document["schema"] == "rewrite/plan/1"
    assert document["spec"] == plan().spec
    assert document["time_ratio"] == 1.084
    assert document["fingerprint"]["inputs"] == ["input_ids int64[1, 512]"]
    assert [each["peak_bytes"] for each in document["frontier"]] == [each.peak_bytes for each in plan().frontier]
    assert document["kept"][0]["keep"] == ["q"]


def test_a_full_diff_has_the_small_and_the_unchanged_lines(golden: SnapshotAssertion) -> None:
    told = text(diff_lines(diff(), 80, full=True))

    assert "input_layernorm.rsqrt" in told
    assert "hidden_states" in told
    assert told == golden


def test_a_diff_of_nothing() -> None:
    side = estimate(2**30, 2**20, 10**9)
    told = text(diff_lines(GraphDiff("m", (), side, side, ()), 80))

    assert "nothing changes" in told
    assert "peak         1.00 GiB ->   1.00 GiB         +0 B  +0.0%" in told
    assert "time" not in told


def test_a_stat(golden: SnapshotAssertion) -> None:
    assert text(stat_view(diff(), 80)) == golden


def test_the_changed_paths() -> None:
    assert [*changed_paths(diff())][:3] == ["model.layers.0", "model.layers.1", "model.layers.2"]


def view() -> View:
    hunk = Hunk("model.layers.0", ("model.layers.0", "model.layers.1"), "Layer", lines(), 2**28, 2**28)
    return View("llama", side(), (hunk,), diff().opaque)


def side() -> Estimate:
    return estimate(2**32, 2**30, 10**12)


@pytest.mark.parametrize("width", [80, 120])
def test_a_model(golden: SnapshotAssertion, width: int) -> None:
    told = text(show_lines(view(), width))

    assert max(map(len, told.splitlines())) <= width
    assert told == golden


def test_a_certificate_that_fails_names_what_differs(golden: SnapshotAssertion) -> None:
    rows = (
        Row("loss", "loss", True, case="train, batch 2, seed 0"),
        Row("h.0.weight", "gradient", False, 0.25, 0.5, 0.0, "train, batch 2, seed 0"),
        Row("h.1.weight", "gradient", False, 1e-7, 1e-7, 1e-6, "train, batch 2, seed 0"),
    )
    certificate = Certificate(False, "exact", rows, ("train, batch 2, seed 0",), ("eval, batch 1: it raised",))

    assert text(certificate_lines(certificate, "gpt2", "checkpoint", 80, full=False)) == golden


def test_documents_are_json_with_every_number() -> None:
    document = json.loads(document_text(diff_document(diff())))

    assert document["schema"] == "rewrite/diff/1"
    assert document["before"]["peak_bytes"] == 9000 * 2**20
    assert document["after"]["by_category"]["saved"] == 1200 * 2**20
    assert document["stat"]["recompute_flops"] == 3 * 10**12
    assert document["stat"]["time_ratio"] == pytest.approx(12 / 9)
    assert [change["path"] for change in document["changes"]] == ["model.layers.0", "model.norm"]
    assert document["changes"][0]["saved_bytes"] == 12 * (32 + 43 - 16) * 2**20 + 12 * 2 * 8192
    assert document["refusals"][0]["source"] == "model.py:9"
    assert [part["path"] for part in document["opaque"]] == ["model.layers.0.moe", "model.layers.1.moe"]
    assert json.loads(document_text(view_document(view())))["regions"][0]["nodes"][1]["source"] == "modeling.py:167"


def test_reports_import_no_torch() -> None:
    modules = "certificate, columns, diff, documents, passes, ranges, show, sizes, step"
    code = f"import sys; from rewrite.report import {modules}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_marks_are_told_by_more_than_colour() -> None:
    marks = {line.plain[0] for line in diff_lines(diff(), 80) if line.style in ("red", "green", "yellow")}

    assert marks == {"-", "+", "~"}
