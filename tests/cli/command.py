"""Runs the command line in this process and keeps what it said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MODELS = str(Path(__file__).with_name("models.py"))
STACK = f"{MODELS}:stack"


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]
