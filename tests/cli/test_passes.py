from __future__ import annotations

import json

from tests.cli.command import Run


def test_the_list_has_name_summary_and_numerics(run: Run) -> None:
    told = run("passes")

    assert told.code == 0
    assert "checkpoint" in told.out
    assert "[exact]" in told.out
    assert "rewrite passes NAME" in told.err
    assert max(map(len, told.out.splitlines())) <= 80


def test_quiet_leaves_the_result_alone(run: Run) -> None:
    told = run("passes", "-q")

    assert told.err == ""
    assert "checkpoint" in told.out


def test_one_pass_shows_its_options_with_defaults(run: Run) -> None:
    told = run("passes", "checkpoint")

    assert told.code == 0
    assert "numerics   exact" in told.out
    assert "policy" in told.out
    assert "default blocks" in told.out


def test_json_has_types_and_defaults(run: Run) -> None:
    document = json.loads(run("passes", "--json").out)

    assert document["schema"] == "rewrite/passes/1"
    (checkpoint,) = [each for each in document["passes"] if each["name"] == "checkpoint"]
    options = {option["name"]: option for option in checkpoint["options"]}
    assert checkpoint["numerics"] == "exact"
    assert options["policy"]["default"] == "blocks"
    assert options["every"] == {**options["every"], "type": "int", "default": 1, "required": False}


def test_an_unknown_pass_names_the_close_one(run: Run) -> None:
    told = run("passes", "chekpoint")

    assert (told.code, told.out) == (2, "")
    assert "no pass is called 'chekpoint'" in told.err
    assert "did you mean `checkpoint`?" in told.err
