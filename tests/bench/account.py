"""What the CPU allocator hands out during a step, put down to its gradients and to everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Event:
    """One allocation (positive) or release (negative)."""

    address: int
    change_bytes: int


def watched(run: Callable[[], Any]) -> tuple[Any, list[Event]]:
    """The result of `run`, and what was allocated and released meanwhile, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    tree = profiled.profiler.kineto_results.experimental_event_tree()
    events: list[Any] = [event for event in _flat(tree) if event.name == "[memory]"]
    events.sort(key=lambda event: event.start_time_ns)
    return result, [Event(event.extra_fields.ptr, event.extra_fields.alloc_size) for event in events]


def _flat(events: Iterable[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)


def level_bytes(events: Iterable[Event]) -> int:
    """What is held at the end of `events`, above what was held at their start."""
    return sum(event.change_bytes for event in events)


def rise_bytes(events: Iterable[Event]) -> int:
    """The most held during `events`, above what was held at their start."""
    level = peak = 0
    for event in events:
        level += event.change_bytes
        peak = max(peak, level)
    return peak


def without(events: Sequence[Event], tensors: Iterable[torch.Tensor]) -> list[Event]:
    """`events` but for the allocations that are, at their end, the storages of `tensors`."""
    last = {event.address: position for position, event in enumerate(events)}
    theirs = {last.get(tensor.untyped_storage().data_ptr()) for tensor in tensors}
    return [event for position, event in enumerate(events) if position not in theirs]
