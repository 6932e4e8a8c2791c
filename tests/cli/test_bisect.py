from __future__ import annotations

import json
from pathlib import Path

from tests.cli.command import STACK, Run

HOT = str(Path(__file__).parent.parent / "bisect" / "models.py")
CALL = ("bisect", f"{HOT}:hot_stack", "-p", "mixed-precision,checkpoint", "--tolerance", "0.01")


def test_what_is_found_is_ready_to_paste(run: Run) -> None:
    told = run(*CALL)

    assert told.code == 0
    lines = told.out.splitlines()
    assert "keep_fp32=[blocks.1.down]" in lines
    assert "-p 'mixed-precision{keep_fp32=[blocks.1.down]},checkpoint'" in lines
    assert lines[1].startswith("FOUND      1 of ")
    assert "before     the output is not finite where it was" in lines
    assert max(map(len, lines)) <= 80

    again = run(
        "bisect", CALL[1], *lines[lines.index(next(x for x in lines if x.startswith("-p")))].replace("'", "").split()
    )
    assert again.code == 0
    assert "\nMET        nothing needs to be kept in fp32 beside what the spec says; 1 trial\n" in again.out


def test_values_near_overflow_are_listed_with_path_and_line(run: Run) -> None:
    lines = run(*CALL, "--max-trials", "2").out.splitlines()

    start = next(number for number, line in enumerate(lines) if line.startswith("range: "))
    assert lines[start].endswith(" above 0.25 of the largest f16, 65504")
    row = next(line for line in lines[start:] if "blocks.1.down" in line)
    assert row.split()[0] == "overflow"
    assert row.split()[2] == "f16"
    assert "models.py:" in row
    assert "fewer may do" in " ".join(lines)


def test_json_is_the_same_result(run: Run) -> None:
    document = json.loads(run(*CALL, "--json").out)

    assert document["schema"] == "rewrite/bisect/1"
    assert document["keep_fp32"] == document["kept"] == ["blocks.1.down"]
    assert document["option"] == "keep_fp32=[blocks.1.down]"
    assert document["minimal"] is True
    assert document["tolerance"] == 0.01
    assert [row["max_abs"] for row in document["before"]] == [None]
    assert all(row["passed"] for row in document["after"])
    ranges = document["ranges"]
    assert (ranges["dtype"], ranges["limit"], ranges["share"]) == ("float16", 65504.0, 0.25)
    assert {"path", "operator", "source", "largest", "state"} == set(ranges["near"][0])


def test_a_model_that_meets_it_already_exits_0(run: Run) -> None:
    told = run("bisect", STACK, "-p", "mixed-precision")

    assert told.code == 0
    assert "MET  " in told.out
    assert "keep_fp32=" not in told.out
    assert "range: each of " in told.out


def test_a_pass_without_the_option_is_bad_usage(run: Run) -> None:
    told = run("bisect", STACK, "-p", "checkpoint")

    assert (told.code, told.out) == (2, "")
    assert "no pass has an option keep_fp32" in told.err
    assert "Next: name one that casts, as -p mixed-precision" in told.err


def test_what_no_operator_in_fp32_meets_exits_3(run: Run) -> None:
    told = run("bisect", STACK, "-p", "mixed-precision{level=O3}", "--rtol", "1e-9")

    assert (told.code, told.out) == (3, "")
    assert "the weights themselves are held in float16" in told.err


def test_a_tolerance_is_positive(run: Run) -> None:
    told = run("bisect", STACK, "-p", "mixed-precision", "--tolerance", "0")

    assert told.code == 2
    assert "is not a positive number" in told.err
