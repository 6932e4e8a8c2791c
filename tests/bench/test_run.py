"""Runs in processes of their own, and how their rows are told: table, JSON, picture."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rewrite import InputError, RewriteError
from tests.bench.__main__ import finite, main
from tests.bench.frontier import check_picture, draw, frontier
from tests.bench.models import entry
from tests.bench.process import Failure, in_own_process, reason_text
from tests.bench.results import Row, document
from tests.bench.run import in_bytes
from tests.bench.step import Measured, Memory, Numbers
from tests.bench.table import reasons, table
from tests.bench.timing import Time, time_beside_eager

MIB = 1024**2


def row(method: str, peak: int, seconds: float) -> Row:
    memory = Memory(10 * MIB, peak, peak - MIB, peak // 2, MIB, None)
    measured = Measured(memory, 10**9, 0.5, Numbers(0.0, 3e-7, float("inf")))
    return Row("small-gpt", method, measured, Time([1.0, 2.0], [seconds, 2 * seconds]), eager_peak_bytes=100 * MIB)


ROWS = [
    row("eager", 100 * MIB, 1.0),
    row("blocks", 50 * MIB, 1.25),
    row("ours:checkpoint", 40 * MIB, 1.1),
    Row("small-gpt", "transformers", reason="not a model of transformers"),
]


def test_a_run_measures_and_says_why_it_could_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"

    done = main(
        ["peers", "--model", "tiny-gpt", "--methods", "transformers", "nothing", "--reps", "0", "--json", str(path)]
    )

    assert done == 0
    found = json.loads(path.read_text())
    eager, transformers, nothing = found["rows"]
    assert found["schema"] == "rewrite/bench/1"
    assert eager["measured"]["memory"]["peak_bytes"] > eager["measured"]["memory"]["gradient_bytes"] > 0
    assert eager["peak_ratio"] == 1
    assert eager["time"] is None
    assert transformers["measured"] is None
    assert transformers["reason"] == "not a model of transformers"
    assert nothing["reason"].startswith("no method 'nothing'")
    assert "transformers: not a model of transformers" in capsys.readouterr().out


def test_a_process_that_ends_or_hangs_is_told() -> None:
    ended = in_own_process(os._exit, 7, environment={}, seconds=120)
    hung = in_own_process(os.getpid, environment={}, seconds=0)

    assert ended == Failure("its process ended with code 7")
    assert hung == Failure("took longer than 0 s")


def test_reasons_are_one_line() -> None:
    assert reason_text(RewriteError("budget", "is too small", "give more")) == "budget: is too small"
    assert reason_text(ValueError("\nfirst\nsecond")) == "ValueError: first"
    assert len(reason_text(ValueError("x" * 500))) == 200


def test_steps_are_timed_in_pairs() -> None:
    measured = time_beside_eager(entry("tiny-gpt"), "blocks", 3)

    assert len(measured.eager_seconds) == len(measured.method_seconds) == 3


def test_a_budget_is_told_by_the_peak_of_eager() -> None:
    memory = Memory(1000, 630, 0, 0, 0, None)

    assert in_bytes("ours:budget=6.3x", memory) == "ours:budget=1100"
    assert in_bytes("ours:budget=16MiB", memory) == "ours:budget=16MiB"
    with pytest.raises(ValueError, match="eager could not be measured"):
        in_bytes("ours:budget=6.3x", None)


def test_the_document_is_json_for_any_reader() -> None:
    text = json.dumps(finite(document(ROWS, 2)), allow_nan=False)

    blocks = json.loads(text)["rows"][1]
    assert blocks["peak_ratio"] == 0.5
    assert blocks["time"] == {"eager_seconds": [1.0, 2.0], "method_seconds": [1.25, 2.5], "ratio": 1.25}
    assert blocks["measured"]["numbers"] == {"loss_error": 0.0, "gradient_error": 3e-7, "buffer_error": None}


def test_the_table_holds_every_row_that_was_measured() -> None:
    console = Console(width=240, no_color=True)
    with console.capture() as captured:
        console.print(table("small-gpt", ROWS))

    text = captured.get()
    (blocks,) = [line.split() for line in text.splitlines() if line.startswith("blocks")]
    assert blocks == [
        "blocks", "50.0", "MiB", "0.500", "2.00x", "1.250x", "49.0", "MiB", "25.0", "MiB", "1", "GFLOP", "0.5", "s",
        "3e-07", "differ",
    ]  # fmt: skip
    assert "transformers" not in text
    assert reasons(ROWS) == ["transformers: not a model of transformers"]


def test_a_point_that_another_beats_is_not_on_the_frontier() -> None:
    assert frontier([(1.0, 1.0), (0.5, 1.3), (0.6, 1.4), (0.5, 1.2)]) == [(0.5, 1.2), (1.0, 1.0)]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "frontier.png"

    draw(ROWS, path)

    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_missing_library_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(InputError, match=r"--png: needs matplotlib(.|\n)*pip install -e '.\[test\]'"):
        check_picture()
