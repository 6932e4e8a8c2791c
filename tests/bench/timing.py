"""CPU time of a step beside eager's, in one process, turn by turn."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.methods import changes
from tests.bench.models import Entry
from tests.bench.workload import Workload

WARM_UP = 2


@dataclass(frozen=True)
class Time:
    """Process seconds of each repetition, in pairs."""

    eager_seconds: Sequence[float]
    method_seconds: Sequence[float]

    @property
    def ratio(self) -> float:
        """Median over the pairs."""
        pairs = zip(self.method_seconds, self.eager_seconds, strict=True)
        return statistics.median(method / eager for method, eager in pairs)


def time_beside_eager(entry: Entry, method: str, repetitions: int) -> Time:
    """Pairs of steps, the first of a pair being eager's and the method's in turn."""
    eager, other = entry.build(), entry.build()
    for change in changes(method):
        change(other)
    for _ in range(WARM_UP):
        eager.step()
        other.step()
    gc.collect()
    gc.freeze()  # or a collection walks all that the libraries loaded, in whichever step it falls
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for repetition in range(repetitions):
        for is_eager in (True, False) if repetition % 2 == 0 else (False, True):
            seconds[is_eager].append(_seconds(eager if is_eager else other))
    gc.unfreeze()
    return Time(seconds[True], seconds[False])


def _seconds(workload: Workload) -> float:
    started = time.process_time()
    workload.step()
    return time.process_time() - started
