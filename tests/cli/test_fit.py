"""`rewrite fit`: batches, sequences and datasets' lengths."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rewrite.cli.lengths import longest
from tests.cli.command import MODELS, STACK, Run

SEQUENCES = f"{MODELS}:sequences"


def test_the_largest_batch(run: Run) -> None:
    told = run("fit", SEQUENCES, "--seq", "32", "--memory", "1MiB", "--allow", "exact")

    assert told.code == 0
    assert "largest batch in 1.00 MiB" in told.out
    row = re.search(r"^sequence 32 +(\d+) +\S+ \w+ +(\d+) +\S+ \w+ +x\d\.\d\d$", told.out, re.M)
    assert row is not None
    plain, planned = map(int, row.groups())
    assert 1 <= plain < planned
    assert "sequence 32: checkpoint{budget=1MiB}" in told.out
    for batch, code in ((plain, 0), (plain + 1, 1)):
        assert run("show", SEQUENCES, "--seq", "32", "--batch", str(batch), "--max-peak", "1MiB").code == code
    for batch, code in ((planned, 0), (planned + 1, 1)):
        arguments = ("--seq", "32", "--batch", str(batch), "--budget", "1MiB", "--allow", "exact")
        assert run("plan", SEQUENCES, *arguments).code == code


def test_the_largest_sequence_stays_within_the_positions(run: Run) -> None:
    sizes = ("num_hidden_layers=1", "n_embd=16", "num_attention_heads=2", "vocab_size=300", "n_positions=48")
    settings = [word for each in sizes for word in ("--set", each)]
    document = json.loads(run("fit", "gpt2", *settings, "--batch", "1", "--memory", "1GiB", "--json").out)

    assert document["schema"] == "rewrite/fit/1"
    assert document["unit"] == "sequence"
    (row,) = document["rows"]
    assert (row["for"], row["plain"], row["planned"], row["spec"]) == ("batch 1", 48, 48, "")


def test_a_datasets_lengths(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("8 8, 16\n16 16 64\n")
    told = run("fit", SEQUENCES, "--lengths", str(path), "--memory", "1MiB", "--allow", "exact")

    assert told.code == 0
    text = "lengths.txt: 6 sequences of 8 to 64, 21 in the mean; all padded to the longest, 67% of a"
    assert text in " ".join(told.out.split())
    rows = re.findall(r"^sequence (\d+) \((\d+)%\) +(\d+)", told.out, re.M)
    assert [(length, share) for length, share, _ in rows] == [("16", "50"), ("64", "100")]
    assert int(rows[0][2]) > int(rows[1][2])


def test_a_memory_that_holds_nothing(run: Run) -> None:
    told = run("fit", STACK, "--memory", "1MiB", "--optimizer", "adamw", "--allow", "exact")

    assert told.code == 0
    assert re.search(r"^its inputs +0 +- +0 +- +-$", told.out, re.M)
    assert "not even the smallest step fits" in told.out


def test_the_longest_of_shares_of_a_dataset() -> None:
    assert longest([1, 2, 3, 4]) == [(0.5, 2), (1.0, 4)]
    assert longest([7]) == [(1.0, 7)]
    assert longest(list(range(1, 101))) == [(0.5, 50), (0.95, 95), (1.0, 100)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it holds no lengths"),
        ("3 x", "'x' is no length"),
        ("4 0", "'0' is no length"),
        ("-1", "'-1' is no length"),
    ],
)
def test_lengths_that_are_none(run: Run, tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    outcome = run("fit", STACK, "--memory", "1GiB", "--lengths", str(path))

    assert outcome.code == 2
    assert told in outcome.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "Missing option '--memory'"),
        (("--memory", "much"), "size 'much': is no number of bytes"),
        (("--memory", "0"), "is no number of bytes"),
        (("--memory", "1GiB", "--batch", "2", "--seq", "3"), "there is nothing left to find"),
        (("--memory", "1GiB", "--seq", "3", "--lengths", "x"), "leave one of the two out"),
        (("--memory", "1GiB", "--lengths", "missing.txt"), "cannot be read: No such file"),
        (("--memory", "1GiB", "--seq", "8"), "takes no seq"),
    ],
)
def test_bad_input_exits_2_and_says_what_to_do(run: Run, arguments: tuple[str, ...], told: str) -> None:
    outcome = run("fit", STACK, *arguments)

    assert outcome.code == 2
    assert outcome.out == ""
    assert told in outcome.err
