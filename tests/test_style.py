"""The tree is linted, formatted and typed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.documents import ROOT


def assert_clean(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing() -> None:
    assert_clean("ruff", "check", "--no-cache")


def test_code_is_formatted() -> None:
    assert_clean("ruff", "format", "--check", "--no-cache")


@pytest.mark.sweep
def test_types_are_strict() -> None:
    assert_clean("mypy")
