"""`rewrite plan`: what it prints, saves and refuses, and plan files given to other commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.command import STACK, Run

WIDE = (STACK, "--batch", "512", "--set", "depth=4")
PLAN = ("plan", *WIDE, "--budget", "2700KiB")


def test_the_spec_the_figures_the_frontier_and_what_limits(run: Run) -> None:
    told = run(*PLAN)

    assert told.code == 0
    assert re.search(r"^\+\+\+ (\S+,)?checkpoint\{budget=\w+\}$", told.out, re.M)
    assert re.search(r"^budget +2\.64 MiB$", told.out, re.M)
    assert re.search(r"^peak +\S+ MiB -> +\S+ MiB +-\S+ MiB +-\S+%$", told.out, re.M)
    assert re.search(r"^time +x1\.\d\d a step, predicted from peak rates of cpu$", told.out, re.M)
    rows = re.findall(r"^([> ]) +(\S+ \w+) +x(\d\.\d\d) #+ +(\S.*)$", told.out, re.M)
    assert 3 <= len(rows) <= 11
    assert [mark for mark, *_ in rows].count(">") == 1
    assert [float(time) for _, _, time, _ in rows[1:]] == sorted(float(time) for _, _, time, _ in rows[1:])
    assert rows[0][3] == "no pass"
    assert re.search(r"^lowest peak: \S+ \w+ in backward, ", told.out, re.M)
    assert re.search(r"are \d+% of it$", told.out, re.M)
    assert "numerics " in told.out
    assert max(len(line) for line in told.out.splitlines() if not line.startswith("+++")) <= 80


def test_the_spec_can_be_pasted(run: Run) -> None:
    document = json.loads(run(*PLAN, "--json").out)
    pasted = json.loads(run("diff", *WIDE, "-p", document["spec"], "--json").out)

    assert pasted["after"]["peak_bytes"] == document["after"]["peak_bytes"] <= document["budget_bytes"]
    assert pasted["before"]["peak_bytes"] == document["before"]["peak_bytes"]


def test_the_document(run: Run) -> None:
    document = json.loads(run(*PLAN, "--json", "--device-profile", "t4", "--optimizer", "sgd").out)

    assert document["schema"] == "rewrite/plan/1"
    assert (document["device"], document["device_profile"], document["optimizer"]) == ("cpu", "t4", "sgd")
    assert document["budget_bytes"] == 2700 * 1024
    assert document["numerics"] in ("exact", "reassociated")
    assert document["frontier"][0]["time_ratio"] == 1
    assert document["fingerprint"]["inputs"] == ["x float32[512, 64]"]
    assert document["kept"][0]["instances"]


def test_a_saved_plan_serves_the_other_commands_and_no_other_model(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    planned = run(*PLAN, "-o", path)
    assert planned.code == 0
    document = json.loads(Path(path).read_text())
    assert document["spec"] in planned.out.replace("\n", "")

    diffed = json.loads(run("diff", *WIDE, "-p", path, "--json").out)
    assert diffed["after"]["peak_bytes"] == document["after"]["peak_bytes"]
    assert ",".join(each["spec"] for each in diffed["passes"]) == document["spec"]
    assert run("verify", *WIDE, "-p", path).code == 0
    refused = run("diff", STACK, "--batch", "256", "--set", "depth=4", "-p", path)
    assert refused.code == 2
    assert "it was made with x float32[512, 64], and these inputs have x float32[256, 64]" in refused.err
    assert "Next: make it again with `rewrite plan`" in refused.err
    assert run("plan", *WIDE, "--budget", "1GiB", "-p", path).code == 2


def test_the_same_plan_is_the_same_file(run: Run, tmp_path: Path) -> None:
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for path in paths:
        run(*PLAN, "-o", str(path))

    assert paths[0].read_text() == paths[1].read_text()


def test_a_budget_that_cannot_be_met_exits_1_with_the_lowest_peak(run: Run) -> None:
    told = run("plan", *WIDE, "--budget", "10KiB")

    assert told.code == 1
    assert told.out == ""
    assert re.search(
        r"error: budget 10\.0 KiB: the lowest peak that .* reaches is .* \(\d+ bytes\), reached in", told.err
    )
    assert "Next: give at least " in told.err


def test_a_budget_that_holds_anyway_takes_no_pass(run: Run) -> None:
    told = run("plan", STACK, "--budget", "1GiB")

    assert told.code == 0
    assert "+++ no pass" in told.out
    assert re.search(r"^time +x1\.00 a step", told.out, re.M)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("plan", STACK), "Missing option '--budget'"),
        (("plan", STACK, "--budget", "lots"), "size 'lots': is no number of bytes"),
        (("plan", STACK, "--budget", "0"), "is no number of bytes"),
        (("plan", STACK, "--budget", "1GiB", "--allow", "sloppy"), "'sloppy' is not one of"),
        (("plan", STACK, "--budget", "1GiB", "--device-profile", "abacus"), "'abacus' is not one of"),
        (("plan", STACK, "--budget", "1GiB", "-p", "magic"), "no pass is called 'magic'"),
        (("plan", STACK, "--budget", "1GiB", "-p", "checkpoint"), "leave checkpoint out, or the budget"),
        (("diff", STACK, "-p", "missing.json"), "plan missing.json: it cannot be read"),
    ],
)
def test_bad_input_exits_2_and_says_what_to_do(run: Run, arguments: tuple[str, ...], told: str) -> None:
    outcome = run(*arguments)

    assert outcome.code == 2
    assert outcome.out == ""
    assert told in outcome.err
