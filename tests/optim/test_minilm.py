"""A real model on a real text: 8-bit Adam ends where AdamW ends, in a quarter of the state."""

from __future__ import annotations

import copy
import functools
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rewrite
from rewrite.memory import estimate_step
from tests.optim.docstrings import Batches, Finder, held_out_loss, state_bytes, train

ROOT = Path(__file__).parents[2]


@functools.lru_cache(maxsize=1)
def pretrained() -> Finder:
    return Finder()


def tuned(name: str, batches: Batches, steps: int, *, embeddings: bool, **options: Any) -> tuple[float, float, int]:
    """Mean loss of the last ten steps, loss on what was held out, bytes of optimizer state."""
    model = copy.deepcopy(pretrained())
    model.encoder.embeddings.requires_grad_(embeddings)
    optimizer = rewrite.optimizer(model, name, lr=5e-5, **options)
    losses = train(model, optimizer, batches, range(steps))[-10:]
    if steps > 10 and not options:
        counted = estimate_step(model, batches.at(0), optimizer=name).by_category["optimizer"]
        assert state_bytes(optimizer) == counted
    return sum(losses) / len(losses), held_out_loss(model, batches), state_bytes(optimizer)


def compared(steps: int, batches: Batches, *, embeddings: bool, **options: Any) -> list[float]:
    """Each of `tuned`'s figures in 8 bits, over that of AdamW."""
    wide = tuned("adamw", batches, steps, embeddings=embeddings)
    narrow = tuned("adam8bit", batches, steps, embeddings=embeddings, **options)
    return [ours / theirs for ours, theirs in zip(narrow, wide, strict=True)]


def test_a_few_steps_are_those_of_adamw() -> None:
    last, held_out, state = compared(3, Batches(4, 16), embeddings=False)

    assert last == pytest.approx(1.0, abs=0.01)
    assert held_out == pytest.approx(1.0, abs=0.01)
    assert 0.25 < state <= 0.30


@pytest.mark.sweep
@pytest.mark.parametrize(("embeddings", "options"), [(False, {}), (True, {"embedding_bits": 8})])
def test_the_final_loss_is_that_of_adamw(embeddings: bool, options: dict[str, Any]) -> None:
    last, held_out, state = compared(60, Batches(16, 48), embeddings=embeddings, **options)
    print(f"last {last:.5f}, held out {held_out:.5f}, state {state:.4f} of AdamW's")

    assert last == pytest.approx(1.0, abs=0.01)
    assert held_out == pytest.approx(1.0, abs=0.01)
    assert 0.25 < state <= 0.30


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["adam8bit", "adamw"])
def test_a_killed_run_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole.pt", name).communicate()[0].splitlines()
    killed = _run(tmp_path / "killed.pt", name)
    assert killed.stdout is not None
    first = [killed.stdout.readline().strip() for _ in range(3)]
    killed.send_signal(signal.SIGKILL)
    rest = killed.communicate()[0].splitlines()
    again = _run(tmp_path / "killed.pt", name).communicate()[0].splitlines()

    assert killed.returncode == -signal.SIGKILL
    assert len(whole) == 8
    lines = dict(line.split() for line in [*first, *rest, *again])
    assert len(first) + len(rest) < len(whole)
    assert lines == dict(line.split() for line in whole)


def _run(stored: Path, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.optim.docstrings", str(stored), name, "8"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_a_run_goes_on_from_a_file(tmp_path: Path) -> None:
    batches = Batches(2, 8)
    model = copy.deepcopy(pretrained())
    model.encoder.embeddings.requires_grad_(False)
    optimizer = rewrite.optimizer(model, "adam8bit", lr=5e-5)
    train(model, optimizer, batches, range(2))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    expected = train(model, optimizer, batches, range(2, 5))

    other = copy.deepcopy(pretrained())
    other.encoder.embeddings.requires_grad_(False)
    again = rewrite.optimizer(other, "adam8bit", lr=5e-5)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert train(other, again, batches, range(2, 5)) == expected
