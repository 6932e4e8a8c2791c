from __future__ import annotations

import json
import re

from tests.cli.command import STACK, Run


def test_graphs_are_shown_with_bytes_and_the_users_line(run: Run) -> None:
    told = run("show", STACK)

    assert told.code == 0
    assert re.search(r"^blocks\.0-2  Block x3  keeps \d", told.out, re.M)
    assert re.search(r"^  relu +4x256 f32 +4\.00 KiB  models\.py:\d+$", told.out, re.M)
    assert re.search(r"^peak: .* in (forward|backward)", told.out, re.M)
    assert re.search(r"^  parameter +\d", told.out, re.M)
    assert max(map(len, told.out.splitlines())) <= 80


def test_json_lists_every_node(run: Run) -> None:
    document = json.loads(run("show", STACK, "--json").out)

    assert document["schema"] == "rewrite/show/1"
    assert [region["class"] for region in document["regions"]] == ["Stack", "Block"]
    kept = sum(region["kept_bytes"] for region in document["regions"])
    assert kept == document["step"]["saved_bytes"]
    relu = next(node for node in document["regions"][1]["nodes"] if node["label"] == "relu")
    assert (relu["shape"], relu["dtype"], relu["value_bytes"]) == ([4, 256], "float32", 4096)


def test_the_optimizer_counts(run: Run) -> None:
    plain, adam = (
        json.loads(run("show", STACK, "--json", "--optimizer", name).out)["step"] for name in ("none", "adamw")
    )

    parameter_bytes = plain["by_category"]["parameter"]
    assert adam["by_category"]["optimizer"] >= 2 * parameter_bytes


def test_max_peak_is_a_gate(run: Run) -> None:
    assert run("show", STACK, "--max-peak", "1B").code == 1
