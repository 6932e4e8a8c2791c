"""Every mistake a user makes: exit code 2, one screen, cause and next step, nothing on stdout, nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import MODELS, STACK, Run

MISTAKES = {
    "unknown architecture": (("brt",), "brt: is no transformers architecture", "did you mean bert"),
    "spelling of an architecture": (("gpt-neox",), "gpt-neox: is no transformers", "did you mean gpt_neox?"),
    "missing directory": (("./nothing",), "there is no such directory", "check the path"),
    "directory without a configuration": ((str(Path(MODELS).parent),), "has no config.json", "save_pretrained"),
    "hub id that cannot be read": (("nobody/nothing",), "nobody/nothing: ", "config.json"),
    "missing file": (("none.py:stack",), "there is no file none.py", "check the path"),
    "file without a factory": ((MODELS,), "names a file but no factory", f"write {MODELS}:factory"),
    "missing module": (("no_such_module:stack",), "there is no module no_such_module", "check its name"),
    "misspelt factory": ((f"{MODELS}:stak",), "has no stak", "did you mean stack"),
    "factory that raises": (
        (f"{MODELS}:failing",),
        "raised FileNotFoundError: weights.bin is not there at models.py:",
        "run on its own",
    ),
    "factory of something else": ((f"{MODELS}:number",), "returned int, not a torch.nn.Module", "return a module"),
    "factory without inputs": (
        (f"{MODELS}:without_inputs",),
        "came without example inputs",
        "(module, example_inputs)",
    ),
    "forward that raises": ((f"{MODELS}:refusing",), "RuntimeError: the tokenizer is missing", "example inputs"),
    "inputs of the wrong size": ((f"{MODELS}:wrong_inputs",), "(2x9 and 8x32)", "example inputs"),
    "inputs of the wrong name": ((f"{MODELS}:wrong_name",), "unexpected keyword argument 'y'", "example inputs"),
    "unknown argument": ((STACK, "--set", "widht=3"), "--set widht: is no argument", "did you mean width"),
    "size the factory does not take": ((STACK, "--seq", "3"), "takes no seq", "give it an argument seq"),
    "task of a factory": ((STACK, "--task", "causal-lm"), "decides its own task", "leave --task out"),
    "too many positions": (("bert", "--seq", "600"), "bert has 512 positions", "--set max_position_embeddings=600"),
    "no batch": (("bert", "--batch", "0"), "is not a positive number", "--batch 1"),
    "unknown setting": (("bert", "--set", "num_hiden_layers=2"), "is no setting of bert", "num_hidden_layers"),
    "setting of the wrong type": (("bert", "--set", "num_hidden_layers=two"), "has an int there (12)", "give an int"),
    "setting without a value": (("bert", "--set", "hidden_size"), "not of the form key=value", "--set num_hidden"),
    "setting that does not fit": (("bert", "--set", "hidden_size=770"), "not a multiple", "check --set"),
    "task without a head": (("bert", "--task", "ctc"), "has no ctc head", "choose --task masked-lm"),
    "unknown pass": ((STACK, "-p", "chekpoint"), "no pass is called 'chekpoint'", "did you mean `checkpoint`?"),
    "malformed spec": ((STACK, "-p", "checkpoint{"), "found the end", "name{option=value,...}"),
    "option of the wrong type": (
        (STACK, "-p", "checkpoint{every=x}"),
        "every takes int, not x",
        "describes its options",
    ),
    "selector without a match": ((STACK, "-p", "checkpoint{select=nothing.*}"), "matches no", "named_modules()"),
    "size that is none": ((STACK, "--max-peak", "3zb"), "'3zb': is no number of bytes", "8GiB"),
    "directory that is missing": ((STACK, "-o", "none/report.txt"), "existing directory", "make the directory"),
}


@pytest.mark.thinned(10)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_cause_and_next_step(
    run: Run, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, cause, next_step = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    passes = () if "-p" in arguments else ("-p", "checkpoint")
    told = run("diff", *arguments, *passes)

    assert (told.code, told.out) == (2, "")
    assert "error: " in told.err
    assert cause in told.err
    assert next_step in told.err.partition("Next: ")[2]
    assert "Traceback" not in told.err
    assert len(told.err.splitlines()) <= 24
    assert list(tmp_path.iterdir()) == []


def test_a_missing_option_is_bad_usage(run: Run) -> None:
    told = run("diff", "bert")

    assert (told.code, told.out) == (2, "")
    assert "-p: no passes are given" in told.err
    assert "`rewrite passes` lists them" in told.err


def test_an_unknown_task_lists_the_tasks(run: Run) -> None:
    told = run("diff", "bert", "-p", "checkpoint", "--task", "nothing")

    assert told.code == 2
    assert "causal-lm" in told.err


def test_the_traceback_is_there_for_who_asks(run: Run) -> None:
    assert "the tokenizer is missing" in run("diff", f"{MODELS}:refusing", "-p", "checkpoint", "-v").err
    assert "Traceback" in run("diff", f"{MODELS}:refusing", "-p", "checkpoint", "-v").err
