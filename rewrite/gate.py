"""Keeps captures and what reads a model's tensors apart: a capture stands fakes in their place for all threads."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

PATIENCE_SECONDS = 60.0
"""How long a capture waits for calls in other threads: one that itself waits for the capturing thread never ends."""


class Gate:
    """Any number of threads read, or one captures; what a thread does within its own capture passes."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection of garbage may call from within
        self._changed = threading.Condition(self._lock)
        self._reading: dict[int, int] = {}
        """Thread -> how many calls of its, one in another, read."""
        self._capturing: int | None = None
        self._waiting = 0
        """Captures that have yet to begin."""

    def __enter__(self) -> None:
        """Begin to read; waits for another thread's capture to end."""
        me = threading.get_ident()
        within = self._reading.get(me)
        if within and self._capturing is None:  # its count is its own, and nobody who is patient captures meanwhile
            self._reading[me] = within + 1
            return
        with self._lock:
            if self._capturing is not None and self._capturing != me:
                self._changed.wait_for(lambda: self._capturing in (None, me))
            self._reading[me] = self._reading.get(me, 0) + 1

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        left = self._reading[me] - 1
        if left:
            self._reading[me] = left
            return
        with self._lock:
            del self._reading[me]
            if self._waiting:
                self._changed.notify_all()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture alone; waits for calls of other threads to end, or to come to a capture of their own."""
        me = threading.get_ident()
        if self._capturing == me:
            yield
            return
        with self._changed:
            mine = self._reading.pop(me, 0)  # it reads nothing while it waits: no two wait for each other
            self._changed.notify_all()
        try:
            with self._changed:
                self._waiting += 1
                try:
                    self._changed.wait_for(lambda: self._capturing is None and not self._reading, PATIENCE_SECONDS)
                    self._changed.wait_for(lambda: self._capturing is None)
                finally:
                    self._waiting -= 1
                self._capturing = me
            yield
        finally:
            with self._changed:
                if self._capturing == me:
                    self._capturing = None
                if mine:
                    self._reading[me] = mine
                self._changed.notify_all()


GATE = Gate()
"""Of the process: fakes may stand in any module that models share."""

if hasattr(os, "register_at_fork"):  # not on Windows; a child has none of the threads that read
    os.register_at_fork(after_in_child=GATE.__init__)  # type: ignore[misc]
