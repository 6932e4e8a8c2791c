"""Every method on every model, eager first: a process for the memory of each, another for its time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.bench import methods
from tests.bench.models import entry
from tests.bench.ours import BUDGET
from tests.bench.process import Failure, in_own_process
from tests.bench.resident_set import ENVIRONMENT
from tests.bench.results import Row
from tests.bench.step import Memory, measure
from tests.bench.timing import time_beside_eager

SMALLER = re.compile(rf"{re.escape(methods.OURS + BUDGET)}([0-9.]+)x")


@dataclass(frozen=True)
class Settings:
    """What to measure of each method."""

    repetitions: int = 10
    """Pairs of timed steps; 0 for no times."""
    seconds: float = 900
    """The longest a process may take."""


def run(
    models: Sequence[str],
    chosen: Sequence[str],
    settings: Settings,
    starting: Callable[[str, str], None] = lambda model, method: None,
) -> Iterator[Row]:
    """A row for each method on each model, as soon as it is there; `starting` is told which one is next."""
    for model in models:
        starting(model, methods.EAGER)
        eager = measured_row(model, methods.EAGER, settings, None)
        yield eager
        memory = eager.measured.memory if eager.measured else None
        for method in chosen:
            if method == methods.EAGER:
                continue
            starting(model, method)
            yield measured_row(model, method, settings, memory)


def measured_row(model: str, method: str, settings: Settings, eager: Memory | None) -> Row:
    """One method on one model; `eager` is None for eager itself."""
    try:
        applied = in_bytes(method, eager)
        methods.parts(applied)
    except ValueError as error:
        return Row(model, method, reason=str(error))
    found = in_own_process(measure, entry(model), applied, environment=ENVIRONMENT, seconds=settings.seconds)
    if isinstance(found, Failure):
        return Row(model, method, reason=found.reason)
    peak = (eager or found.memory).peak_bytes
    if not settings.repetitions:
        return Row(model, method, found, eager_peak_bytes=peak)
    arguments = (entry(model), applied, settings.repetitions)
    time = in_own_process(time_beside_eager, *arguments, environment={}, seconds=settings.seconds)
    if isinstance(time, Failure):
        return Row(model, method, found, reason=f"not timed: {time.reason}", eager_peak_bytes=peak)
    return Row(model, method, found, time, eager_peak_bytes=peak)


def in_bytes(method: str, eager: Memory | None) -> str:
    """`ours:budget=6.3x` with the bytes of a step whose peak above parameters is 6.3 times smaller than eager's."""
    smaller = SMALLER.fullmatch(method)
    if smaller is None:
        return method
    if eager is None:
        raise ValueError("the budget is told by eager's peak, and eager could not be measured")
    return f"{methods.OURS}{BUDGET}{eager.resident_bytes + int(eager.peak_bytes / float(smaller.group(1)))}"
