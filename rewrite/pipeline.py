"""Runs passes one after another on copies of the program, and holds each to its contract."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rewrite.check import broken_promise
from rewrite.contract import Pass, PassResult
from rewrite.errors import ContractError, PassCrashError, RewriteError
from rewrite.program import Program
from rewrite.text import program_text


class Observer(Protocol):
    """What hangs on the pipeline: timing, provenance, printing, verifying."""

    def before(self, pass_: Pass, program: Program) -> None:
        """`pass_` is about to be applied to a copy of `program`."""

    def after(self, pass_: Pass, program: Program, result: PassResult, seconds: float) -> None:
        """`pass_` made `result` out of `program` and has kept its contract."""


@dataclass(frozen=True)
class Step:
    """One pass of a pipeline that has run."""

    applied: Pass
    before: Program
    result: PassResult
    seconds: float

    @property
    def after(self) -> Program:
        return self.result.program


@dataclass(frozen=True)
class PipelineResult:
    """The last program, and how it came about."""

    program: Program
    steps: tuple[Step, ...] = ()


def run(program: Program, passes: Sequence[Pass], observers: Sequence[Observer] = ()) -> PipelineResult:
    """Apply `passes` in order; each gets a copy of the program before it, so `program` stays as it is.

    A pass that sets the precision goes before the others.

    Raises `ContractError` when a pass does other than it says, `PassCrashError` when it raises an error of its own;
    a `RewriteError` raised by a pass goes through as it is.
    """
    steps: list[Step] = []
    for pass_ in sorted(passes, key=lambda each: each.precision() is None):
        for observer in observers:
            observer.before(pass_, program)
        started = time.perf_counter()
        result = _apply(pass_, program, steps)
        seconds = time.perf_counter() - started
        for observer in observers:
            observer.after(pass_, program, result, seconds)
        steps.append(Step(pass_, program, result, seconds))
        program = result.program
    return PipelineResult(program, tuple(steps))


def _apply(pass_: Pass, program: Program, steps: Sequence[Step]) -> PassResult:
    subject = f"pass {pass_} ({_history(steps)})"
    text = program_text(program)
    try:
        result = pass_.apply(program.copy())
    except RewriteError:
        raise
    except Exception as fault:
        cause = f"apply() raised {type(fault).__name__}: {fault}"
        raise PassCrashError(subject, cause, "report this to the author of the pass, or leave the pass out") from fault
    broken = broken_promise(program, text, result)
    if broken is not None:
        raise ContractError(subject, broken.cause, f"pass developer: {broken.remedy}")
    return result


def _history(steps: Sequence[Step]) -> str:
    return f"after {', '.join(str(step.applied) for step in steps)}" if steps else "the first pass"
