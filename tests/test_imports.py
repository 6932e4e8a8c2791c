"""Who may import whom, what loads no torch, and a public face that is all there."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

import rewrite
from tests.documents import ROOT

HEAVY = ("torch", "transformers", "numpy", "scipy", "sympy")


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def loaded_by(statement: str, arguments: Sequence[str] = ()) -> set[str]:
    """Which of the heavy packages are loaded after `statement` ran, even if it exits."""
    code = f"""
import sys
sys.argv[1:] = {list(arguments)!r}
try:
    {statement}
except SystemExit as end:
    assert not end.code, end.code
print("loaded:", *[name for name in {HEAVY!r} if name in sys.modules])
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split("loaded:")[-1].split())


def test_import_rules_hold() -> None:
    done = python("from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache")

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["passes"], ["passes", "checkpoint"], ["passes", "--json"]])
def test_light_commands_load_no_torch(arguments: list[str]) -> None:
    assert loaded_by("from rewrite.cli import main; main()", arguments) == set()


def test_importing_the_package_and_its_passes_loads_no_torch() -> None:
    assert loaded_by("import rewrite, passes") == set()


def test_reports_load_no_torch() -> None:
    statement = "import importlib, pkgutil; reports = importlib.import_module('rewrite.report'); "
    statement += "[__import__(m.name) for m in pkgutil.walk_packages(reports.__path__, 'rewrite.report.')]"

    assert loaded_by(statement) == set()


def test_the_probe_sees_torch_when_it_is_loaded() -> None:
    assert "torch" in loaded_by("import torch")


@pytest.mark.parametrize("name", rewrite.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(rewrite, name)

    if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value)
    assert name in dir(rewrite)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        rewrite.no_such_name  # noqa: B018
