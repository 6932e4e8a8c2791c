from __future__ import annotations

import json

import pytest

from rewrite.cli import memory
from tests.cli.command import MODELS, STACK, Run

GPT2 = ("gpt2", "--set", "n_layer=2", "--set", "n_embd=32", "--set", "n_head=4", "--set", "vocab_size=128")


def test_a_rewrite_that_keeps_the_numbers_passes(run: Run) -> None:
    told = run("verify", STACK, "-p", "checkpoint")

    assert told.code == 0
    assert "\nPASS       verified: " in told.out
    assert "promise    exact" in told.out
    assert "gradient" in told.out


def test_an_architecture_gets_real_weights(run: Run) -> None:
    told = run("verify", *GPT2, "-p", "checkpoint", "--batch", "2", "--seq", "8", "--json")
    document = json.loads(told.out)

    assert told.code == 0
    assert document["passed"] is True
    assert document["schema"].startswith("rewrite/certificate/")
    assert document["passes"] == "checkpoint"
    assert sum(row["kind"] == "gradient" for row in document["rows"]) >= 28


def test_a_model_that_differs_exits_3(run: Run) -> None:
    told = run("verify", f"{MODELS}:drifting")

    assert told.code == 3
    assert "\nFAIL       differs: " in told.out
    assert "Traceback" not in told.err


def test_a_model_beyond_the_memory_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1024)
    told = run("verify", *GPT2, "--batch", "2", "--seq", "8")

    assert (told.code, told.out) == (2, "")
    assert "1.00 KiB are free here" in told.err
    assert "--set num_hidden_layers=2" in told.err


def test_this_machine_says_how_much_is_free() -> None:
    available = memory.available_bytes()

    assert available is None or available > 0
