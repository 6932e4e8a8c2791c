"""Help, exit codes, what is imported, and what happens when the ground gives way."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from rewrite import registry
from rewrite.cli.group import COMMANDS
from tests.cli.command import STACK, Run

LIGHT = ("torch", "transformers", "numpy")


def in_a_process(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    script = (
        "import sys\nfrom rewrite.cli import main\n"
        f"{code}\nstatus = main({list(arguments)!r})\n"
        f"sys.exit(99 if set({LIGHT!r}) & set(sys.modules) else status)"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [("--help",), ("passes",), ("diff", "--help"), ("verify", "--help")])
def test_help_and_the_list_of_passes_import_no_torch(arguments: tuple[str, ...]) -> None:
    done = in_a_process(*arguments)

    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_check_for_torch_finds_it() -> None:
    assert in_a_process("--help", code="import torch").returncode == 99


def test_help_names_every_command(run: Run) -> None:
    told = run("--help")

    assert told.code == 0
    for name, summary in COMMANDS.items():
        assert f"{name} " in told.out
        assert summary.split(",")[0] in told.out


def test_a_misspelt_command_names_the_close_one(run: Run) -> None:
    told = run("dif", "bert")

    assert (told.code, told.out) == (2, "")
    assert "No such command 'dif'. Did you mean diff?" in told.err


def test_version(run: Run) -> None:
    told = run("--version")

    assert told.code == 0
    assert told.out.startswith("rewrite ")


def test_a_fault_of_ours_is_one_screen_without_a_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[str, ...]:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(registry, "names", broken)
    told = run("passes")

    assert (told.code, told.out) == (101, "")
    assert "internal fault: ZeroDivisionError: by zero" in told.err
    assert "Traceback" not in told.err
    assert len(told.err.splitlines()) < 10
    assert "Traceback" in run("passes", "-v").err


def test_an_interrupt_exits_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> tuple[str, ...]:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "names", interrupted)
    told = run("passes")

    assert told.code == 130
    assert told.err.strip() == "interrupted"


def test_a_closed_pipe_is_no_failure() -> None:
    """The reader is gone before the first byte, as in `rewrite passes | true`."""
    reading, writing = os.pipe()
    os.close(reading)
    code = "import sys; from rewrite.cli import main; sys.exit(main(['passes', '-q']))"
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)

    assert (done.returncode, done.stderr) == (0, "")


def test_options_come_from_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWRITE_BATCH", "6")
    monkeypatch.setenv("REWRITE_STAT", "1")
    monkeypatch.setenv("REWRITE_PASSES", "checkpoint")
    told = run("diff", STACK, "--json")

    assert told.code == 0
    (change,) = json.loads(told.out)["changes"]
    assert next(node["shape"] for node in change["nodes"] if node["label"] == "relu") == [6, 256]
