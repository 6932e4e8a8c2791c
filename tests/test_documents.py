"""What the README and the examples show is what happens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT, marked_block, python_blocks

SET_UP = ("python3 -m venv", ".venv/bin/pip install")


def run(arguments: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("example", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_example_runs(example: str) -> None:
    assert run([sys.executable, f"examples/{example}"])


def test_the_readme_has_python_to_run() -> None:
    assert python_blocks("README.md")


@pytest.mark.parametrize("block", python_blocks("README.md"))
def test_python_of_the_readme_runs(block: str) -> None:
    printed = run([sys.executable, "-c", block]).split()

    assert printed[-1] == "True"


def test_the_commands_of_the_readme_run_after_the_set_up() -> None:
    commands = [line for line in marked_block("README.md", "run").splitlines() if not line.startswith(SET_UP)]
    rewrite = [sys.executable, "-c", "from rewrite.cli import main; main()"]
    programs = {".venv/bin/rewrite": rewrite, ".venv/bin/python": [sys.executable]}

    assert commands
    for command in commands:
        program, *arguments = command.split()
        assert run([*programs[program], *arguments])


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()

    assert "README.md" in script
    assert "pytest" not in script
    assert "-m pytest" in marked_block("README.md", "test")
    assert Path(ROOT / ".ci" / "run").stat().st_mode & 0o100
