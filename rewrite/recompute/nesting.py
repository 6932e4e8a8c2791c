"""Recompute inside recompute: within a segment that is recomputed whole, inner segments are too.

Torch's checkpoint counts what is saved inside it, and nests in itself alone. So that it counts the same twice, code
inside that was chosen for the first run is not chosen anew for the second.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

NOTHING = object()


class _Local(threading.local):
    within = False
    holder: Any = None
    """The run that makes again what is passed to the block that runs, if there is one."""
    listening: tuple[list[Any], ...] = ()
    """What the first runs that are under way have chosen so far."""
    repeated: Iterator[Any] | None = None
    """What the first run chose, while a second one is under way."""


_local = _Local()


def within_whole() -> bool:
    """Whether a segment that is recomputed whole is running, for the first time or again."""
    return _local.within


def chosen_before() -> Any:
    """In a second run, what the first one chose at this place; NOTHING elsewhere."""
    return NOTHING if _local.repeated is None else next(_local.repeated, NOTHING)


def remember(choice: Any) -> None:
    """Tell the first runs under way of a choice."""
    for choices in _local.listening:
        choices.append(choice)


@contextlib.contextmanager
def first_run(choices: list[Any]) -> Iterator[None]:
    """The first run of a segment that is recomputed whole; fills `choices`."""
    with _as(within=True, holder=None, listening=(*_local.listening, choices), repeated=_local.repeated):
        yield


@contextlib.contextmanager
def second_run(choices: list[Any]) -> Iterator[None]:
    """A recompute of the segment whose first run filled `choices`."""
    with _as(within=True, holder=None, listening=(), repeated=iter(choices)):
        yield


def holder() -> Any:
    """The run that makes again what passes between blocks, in the forward of one of these."""
    return _local.holder


@contextlib.contextmanager
def block(run: Any, choices: list[Any]) -> Iterator[None]:
    """The forward of a block whose inputs `run` makes again; fills `choices`."""
    with _as(holder=run, listening=(*_local.listening, choices)):
        yield


@contextlib.contextmanager
def block_again(choices: list[Any]) -> Iterator[None]:
    """A run of that block for its results alone."""
    with _as(holder=None, listening=(), repeated=iter(choices)):
        yield


@contextlib.contextmanager
def _as(**state: Any) -> Iterator[None]:
    before = {name: getattr(_local, name) for name in state}
    vars(_local).update(state)
    try:
        yield
    finally:
        vars(_local).update(before)
