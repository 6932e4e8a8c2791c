"""Recompute inside recompute: within a segment that is recomputed whole, inner segments are too.

Torch's checkpoint counts what is saved inside it, and nests in itself alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Local(threading.local):
    within = False


_local = _Local()


def within_whole() -> bool:
    """Whether a segment that is recomputed whole is running, for the first time or again."""
    return _local.within


@contextlib.contextmanager
def whole_segment() -> Iterator[None]:
    """The run of a segment that is recomputed whole."""
    before, _local.within = _local.within, True
    try:
        yield
    finally:
        _local.within = before
