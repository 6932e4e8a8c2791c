"""`rewrite.bisect`: the operators to keep in fp32, found by running the model with some of them kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rewrite.api import checked_passes
from rewrite.bisect.globs import Globs
from rewrite.bisect.minimal import smallest
from rewrite.bisect.result import Bisection
from rewrite.bisect.trials import Trials
from rewrite.certificate import farthest
from rewrite.comparison import Bound
from rewrite.contract import Numerics, Pass
from rewrite.errors import InputError, PassError, VerifyError
from rewrite.inputs import as_call
from rewrite.observation import tensors
from rewrite.options import options
from rewrite.tolerance import magnitude, tolerance_for

OPTION = "keep_fp32"
"""The option, of any pass, that takes selectors of modules and operators to leave in fp32."""


def bisect(
    model: nn.Module,
    passes: str | Sequence[Pass],
    example_inputs: Any,
    *,
    tolerance: float | None = None,
    max_trials: int | None = None,
    seed: int = 0,
) -> Bisection:
    """The fewest operators to keep in fp32 so that the rewritten model's outputs are finite and near the original's.

    `passes` is a pipeline, or its text, with one pass that has an option `keep_fp32`, such as `mixed-precision`. The
    model and its rewrites run forward on `example_inputs` in eval mode. Every floating-point output must then differ
    by no more than `tolerance` times the largest magnitude of the original's; without one, by what rounding in each
    layer may come to (`rewrite/tolerance.py`). What is found is 1-minimal: with any one operator left out, an output is
    too far off. `max_trials` ends the search early, with the smallest set that was found by then. `model` is left as it
    was. Algorithm and source: `rewrite/bisect/minimal.py`.

    Raises PassError when no pass, or several, have the option; VerifyError when the outputs are too far off with every
    operator in fp32; InputError for a tolerance that is not a positive number, for inputs that the model cannot run;
    and what `optimize` raises.
    """
    if tolerance is not None and not 0 < tolerance < float("inf"):
        raise InputError(f"tolerance {tolerance}", "is not a positive number", "give a relative difference, as 0.01")
    if max_trials is not None and max_trials < 1:
        raise InputError(f"max_trials {max_trials}", "is not a positive number", "give 1 or more, or leave it out")
    chosen = checked_passes(model, passes)
    holder = _holder(chosen)
    trials = Trials(model, chosen, holder, OPTION, as_call(example_inputs), seed)
    allowed = _Relative(tolerance) if tolerance else _by_depth(model, example_inputs, holder)
    before = trials.rows(allowed, ())
    if all(row.passed for row in before):
        return Bisection((), chosen, (), trials.candidates, before, before, trials.count, tolerance)
    search = _Search(trials, allowed, max_trials)
    if not search.holds(list(trials.candidates)):
        all_kept = trials.rows(allowed, search.globs.of(trials.candidates))
        raise _out_of_reach(chosen, holder, farthest(all_kept))
    try:
        smallest(trials.candidates, search.holds)
        minimal = True
    except _EnoughError:
        minimal = False
    found = search.globs.of(search.best)
    after = trials.rows(allowed, found)
    given = trials.with_kept(found)
    return Bisection(
        found, given, tuple(search.best), trials.candidates, before, after, trials.count, tolerance, minimal
    )


class _EnoughError(Exception):
    """The trials that were allowed are used up."""


class _Search:
    """Answers whether keeping some operators is enough, and remembers the fewest that were."""

    def __init__(self, trials: Trials, allowed: Bound, limit: int | None) -> None:
        self.trials, self.allowed, self.limit = trials, allowed, limit
        self.globs = Globs(trials.candidates)
        self.best: list[str] = list(trials.candidates)
        self.known: dict[frozenset[str], bool] = {}

    def holds(self, kept: list[str]) -> bool:
        key = frozenset(kept)
        if key not in self.known:
            if self.limit is not None and self.trials.count >= self.limit:
                raise _EnoughError
            self.known[key] = all(row.passed for row in self.trials.rows(self.allowed, self.globs.of(kept)))
        if self.known[key] and len(kept) < len(self.best):
            self.best = kept
        return self.known[key]


class _Relative:
    """Allows each output a part of its own largest magnitude."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance

    def bound(self, value: torch.Tensor, largest: float) -> float:
        """Whole numbers and truth values have to be equal."""
        return self.tolerance * magnitude(value) if value.is_floating_point() else 0.0


def _by_depth(model: nn.Module, example_inputs: Any, holder: Pass) -> Bound:
    precision = holder.precision()
    low = getattr(torch, precision.dtype) if precision is not None else torch.bfloat16
    given = [tensor for _, tensor in tensors(as_call(example_inputs))]
    return tolerance_for(model, given, Numerics.REDUCED, low)


def _holder(passes: Sequence[Pass]) -> Pass:
    """The pass whose option says what stays in fp32."""
    found = [each for each in passes if OPTION in options(type(each))]
    subject = f"bisect {','.join(map(str, passes)) or '(no pass)'}"
    if not found:
        raise PassError(subject, f"no pass has an option {OPTION}", "name one that casts, as -p mixed-precision")
    if len(found) > 1:
        raise PassError(subject, f"{len(found)} passes have an option {OPTION}", "leave one of them in the spec")
    return found[0]


def _out_of_reach(passes: Sequence[Pass], holder: Pass, told: str) -> VerifyError:
    subject = f"bisect {','.join(map(str, passes))}"
    precision = holder.precision()
    if precision is not None and precision.low_weights:
        cause = f"with every operator kept {told}: the weights themselves are held in {precision.dtype}"
        return VerifyError(subject, cause, "choose a level that holds them in fp32, or allow more with tolerance")
    return VerifyError(
        subject,
        f"with every operator in fp32 {told}",
        "allow more with a larger tolerance, or find what else of the spec changes numbers with `rewrite verify`",
    )
