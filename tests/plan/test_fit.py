"""The batch and the sequence that fit, against estimates of the sizes next to them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import rewrite
from rewrite.errors import InputError
from tests.documents import ROOT
from tests.plan.joint_models import Language, batch
from tests.plan.trial_and_error import build, inputs


def test_the_largest_batch_without_passes_and_with_the_best_plan() -> None:
    model = Language(layers=2)
    memory = rewrite.estimate(model, batch(3)).peak_bytes + 100
    found = rewrite.fit(model, batch, memory, allow="exact")

    assert found.plain == 3
    assert found.plain_peak_bytes == memory - 100
    assert found.planned > 3
    assert found.planned_peak_bytes <= memory
    assert found.spec
    planned = rewrite.optimize(model, found.spec, example_inputs=batch(found.planned))
    assert rewrite.estimate(planned, batch(found.planned)).peak_bytes == found.planned_peak_bytes
    with pytest.raises(rewrite.BudgetError):
        rewrite.optimize(model, budget=memory, allow="exact", example_inputs=batch(found.planned + 1))


@pytest.mark.sweep
def test_chunks_fit_more_than_recompute_alone() -> None:
    model = Language(layers=2)
    memory = rewrite.estimate(model, batch(2, 64)).peak_bytes
    exact, chunked = (rewrite.fit(model, batch, memory, allow=allow, most=7) for allow in ("exact", "reassociated"))

    assert exact.planned < chunked.planned == 7
    assert "chunk-loss" in chunked.spec


def test_the_largest_sequence_is_a_multiple_of_the_step() -> None:
    model = Language(layers=2)
    memory = rewrite.estimate(model, batch(2, 64)).peak_bytes
    found = rewrite.fit(model, lambda length: batch(2, length), memory, step=8, most=64)

    assert (found.plain, found.planned, found.spec) == (64, 64, "")


def test_a_memory_that_holds_nothing() -> None:
    found = rewrite.fit(Language(layers=2), batch, 1000)

    assert (found.plain, found.planned, found.spec) == (0, 0, "")


@pytest.mark.sweep
def test_find_batch_is_the_last_that_fits() -> None:
    model = Language(layers=2)
    memory = rewrite.estimate(model, batch(6)).peak_bytes

    assert rewrite.find_batch(model, batch, memory) == 6
    assert rewrite.find_batch(model, batch, memory - 1) == 5
    assert rewrite.find_batch(model, batch, memory, most=4) == 4
    assert rewrite.find_batch(model, batch, memory, passes="chunk-loss") > 6
    assert rewrite.find_batch(model, batch, memory, optimizer="adamw") < 6


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_batch_is_that_of_trial_and_error_under_a_hard_limit_give_or_take_one(name: str) -> None:
    memory = 400 * 2**20
    found = rewrite.find_batch(build(name), inputs, memory)

    assert found > 8
    assert fits(name, found - 1, memory)
    assert not fits(name, found + 2, memory)


def fits(name: str, size: int, memory: int) -> bool:
    """Whether a real step of that batch runs in so many bytes, in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
    command = [sys.executable, "-m", "tests.plan.trial_and_error", name, str(size), str(memory)]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=600, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 0


def test_bad_input_is_told() -> None:
    with pytest.raises(InputError, match="is no number of bytes"):
        rewrite.find_batch(Language(), batch, "lots")
    with pytest.raises(InputError, match="is no number of bytes"):
        rewrite.fit(Language(), batch, "lots")
