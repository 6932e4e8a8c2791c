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


def test_a_table_of_levels(run: Run) -> None:
    printed = run("passes", "mixed-precision").out
    rows = [line.split() for line in printed.splitlines()]
    assert ["O0", "O1", "O2", "O3"] in rows
    assert ["cast_model_type", "fp32", "None", "half", "half"] in rows
    assert ["patch_torch_functions", "False", "True", "False", "False"] in rows
    assert ["keep_batchnorm_fp32", "None", "None", "True", "False"] in rows
    assert ["master_weights", "False", "None", "True", "False"] in rows
    assert ["loss_scale", "1.0", "dynamic", "dynamic", "1.0"] in rows


def test_what_options_make_of_a_level(run: Run) -> None:
    told = run("passes", "mixed-precision{level=O2,dtype=bf16,keep_batchnorm_fp32=false}")
    rows = [line.split() for line in told.out.splitlines()]
    assert told.code == 0
    assert ["keep_batchnorm_fp32", "False"] in rows
    assert ["loss_scale", "1.0"] in rows
    assert ["cast_model_type", "half"] in rows
    wrong = run("passes", "mixed-precision{level=O9}")
    assert wrong.code == 2
    assert "there is no such level" in wrong.err
