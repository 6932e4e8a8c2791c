from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.command import MODELS, STACK, Run

DIFF = ("diff", STACK, "-p", "checkpoint")
BERT = ("bert", "--set", "num_hidden_layers=3", "--set", "hidden_size=48", "--batch", "2", "--seq", "32")


def test_a_diff_has_hunks_by_module_path_with_bytes(run: Run) -> None:
    told = run(*DIFF)

    assert told.code == 0
    assert re.search(r"^@@ blocks\.0-2 Block x3 @@  -\d", told.out, re.M)
    assert re.search(r"^-keep +relu +4x256 f32 +4\.00 KiB$", told.out, re.M)
    assert re.search(r"^\+recompute +\d operations, in the backward$", told.out, re.M)
    assert re.search(r"^peak +\S+ \w+ -> +\S+ \w+ +[-+]\S+ \w+ +[-+]\S+%$", told.out, re.M)
    assert re.search(r"^peak before: .* in (forward|backward)", told.out, re.M)
    assert "Not counted: " in told.out


def test_the_result_is_on_stdout_and_the_narration_on_stderr(run: Run) -> None:
    told = run("diff", *BERT, "-p", "checkpoint")

    assert told.code == 0
    assert told.out.startswith("--- bert  BertForMaskedLM (masked-lm), batch 2, sequence 32\n+++ checkpoint\n")
    assert "BertForMaskedLM" in told.err
    assert "@@ bert.encoder.layer.0-2 BertLayer x3 @@" in told.out


def test_text_in_a_pipe_is_plain_and_fits_80_columns(run: Run) -> None:
    told = run("diff", *BERT, "-p", "checkpoint")

    assert "\x1b" not in told.out
    assert max(map(len, told.out.splitlines())) <= 80
    assert told.out.isascii()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("columns", [50, 80, 140])
def test_columns_decide_the_width(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    told = run(*DIFF)

    hunk = told.out[told.out.index("@@") : told.out.index("\n\n")]
    assert max(map(len, hunk.splitlines())) <= columns
    assert ("models.py:" in hunk) == (columns >= 110)
    assert ("4x256" in hunk) == (columns >= 64)


def test_color_is_asked_for_or_never(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[31m" in run(*DIFF, "--color", "always").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[32m" in run(*DIFF).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run(*DIFF).out


def test_json_is_the_same_result(run: Run) -> None:
    told = run(*DIFF, "--json", "--optimizer", "adamw", "--device-profile", "a100")
    document = json.loads(told.out)

    assert told.code == 0
    assert document["schema"] == "rewrite/diff/1"
    assert (document["device"], document["optimizer"]) == ("cpu", "adamw")
    for side in ("before", "after"):
        assert document[side]["peak_bytes"] == sum(document[side]["by_category"].values())
        assert document[side]["saved_bytes"] > 0
        assert document[side]["peak"]["largest"]
    (change,) = document["changes"]
    assert change["instances"] == ["blocks.0", "blocks.1", "blocks.2"]
    saved = document["before"]["saved_bytes"] - document["after"]["saved_bytes"]
    assert change["saved_bytes"] == saved == -document["stat"]["saved_delta_bytes"]
    assert saved == 3 * sum(node["before_bytes"] - node["after_bytes"] for node in change["nodes"])
    assert document["passes"][0]["spec"] == "checkpoint"
    assert document["stat"]["device_profile"] == "a100"
    assert document["stat"]["time_ratio"] > 1
    assert document["stat"]["recompute_flops"] > 0
    assert (document["refusals"], document["opaque"]) == ([], [])


def test_bytes_of_the_lines_are_what_the_step_saves(run: Run) -> None:
    document = json.loads(run(*DIFF, "--json").out)
    (change,) = document["changes"]
    relu = next(node for node in change["nodes"] if node["label"] == "relu")

    assert relu["before_bytes"] == 4 * 256 * 4
    assert relu["after_bytes"] == 0
    assert re.fullmatch(r"models\.py:\d+", relu["source"])


def test_exit_code_says_whether_anything_changes(run: Run) -> None:
    assert run(*DIFF).code == 0
    assert run(*DIFF, "--exit-code").code == 1
    assert run("diff", STACK, "-p", "", "--exit-code").code == 0


def test_max_peak_is_a_gate(run: Run) -> None:
    assert run(*DIFF, "--max-peak", "1GiB").code == 0
    told = run(*DIFF, "--max-peak", "1KiB")

    assert told.code == 1
    assert "over --max-peak: " in told.err
    assert told.out


def test_stat_has_a_line_a_hunk(run: Run) -> None:
    lines = run(*DIFF, "--stat").out.splitlines()

    assert re.fullmatch(r"blocks\.0-2 \| +-\S+ KiB -+", lines[0])
    assert [line.split()[0] for line in lines[1:]] == ["peak", "saved", "recompute", "time"]


def test_name_only_lists_every_instance(run: Run) -> None:
    assert run(*DIFF, "--name-only").out.split() == ["blocks.0", "blocks.1", "blocks.2"]


def test_segments_of_the_parent_are_named(run: Run) -> None:
    told = run("diff", STACK, "-p", "checkpoint{policy=sqrt}", "--set", "depth=9")

    assert told.code == 0
    assert re.search(r"^\+recompute blocks\.\d+-\d+, in the backward$", told.out, re.M)


def test_a_pass_that_does_nothing_says_why(run: Run) -> None:
    told = run("diff", f"{MODELS}:drifting", "-p", "checkpoint")

    assert told.code == 0
    assert "nothing changes" in told.out
    assert "  checkpoint at (root)" in told.out


def test_a_file_is_written_whole_and_never_replaced_unasked(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    first = run(*DIFF, "-o", str(path))
    assert (first.code, first.out) == (0, "")
    assert json.loads(path.read_text())["schema"] == "rewrite/diff/1"

    path.write_text("mine")
    refused = run(*DIFF, "-o", str(path))
    assert refused.code == 2
    assert "the file exists" in refused.err
    assert path.read_text() == "mine"

    assert run(*DIFF, "-o", str(path), "--force").code == 0
    assert path.read_text() != "mine"
    assert list(tmp_path.iterdir()) == [path]


def test_batch_reaches_the_factory(run: Run) -> None:
    small, large = (json.loads(run(*DIFF, "--json", "--batch", size).out) for size in ("4", "8"))

    assert large["before"]["saved_bytes"] == 2 * small["before"]["saved_bytes"]


def test_more_layers_fold_into_one_hunk(run: Run) -> None:
    told = run(*DIFF, "--set", "depth=7")

    assert "@@ blocks.0-6 Block x7 @@" in told.out
    assert told.out.count("\n@@ ") == 1
