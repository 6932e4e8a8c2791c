"""Recompute inside recompute: what an outer segment will run again need not be recomputed by itself the first time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Local(threading.local):
    first = False


_local = _Local()


def in_first_run() -> bool:
    """Whether an outer segment is in its forward: its own hooks drop whatever is saved inside."""
    return _local.first


@contextlib.contextmanager
def first_run() -> Iterator[None]:
    """The forward of a segment that will be run again as a whole."""
    before, _local.first = _local.first, True
    try:
        yield
    finally:
        _local.first = before
