"""Captures wait for calls in other threads and these for captures, and nobody waits in a circle."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from rewrite import gate
from rewrite.gate import Gate

SOON = 0.2
LATE = 10.0


def started(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def capturing(shared: Gate, inside: threading.Event) -> Callable[[], None]:
    def work() -> None:
        with shared.capturing():
            inside.set()

    return work


def test_a_capture_waits_for_a_call_of_another_thread() -> None:
    shared, inside = Gate(), threading.Event()
    with shared:
        thread = started(capturing(shared, inside))
        assert not inside.wait(SOON)
    assert inside.wait(LATE)
    thread.join(LATE)


def test_a_call_waits_for_the_capture_of_another_thread() -> None:
    shared, inside = Gate(), threading.Event()

    def call() -> None:
        with shared:
            inside.set()

    with shared.capturing():
        thread = started(call)
        assert not inside.wait(SOON)
    assert inside.wait(LATE)
    thread.join(LATE)


def test_a_thread_passes_within_its_own_capture() -> None:
    shared = Gate()
    with shared, shared, shared.capturing(), shared, shared.capturing(), shared:
        pass
    with shared.capturing():
        pass
    assert not shared._reading


def test_calls_that_both_come_to_a_capture_do_not_wait_for_each_other() -> None:
    shared, both, done = Gate(), threading.Barrier(2), []

    def work() -> None:
        with shared:
            both.wait(LATE)
            with shared.capturing():
                done.append(threading.get_ident())

    for thread in [started(work), started(work)]:
        thread.join(LATE)
    assert len(done) == 2


def test_a_call_that_waits_for_the_capturing_thread_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "PATIENCE_SECONDS", SOON)
    shared, inside = Gate(), threading.Event()
    with shared:
        thread = started(capturing(shared, inside))
        assert inside.wait(LATE)
        thread.join(LATE)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_process_waits_for_no_thread_of_its_parent() -> None:
    with gate.GATE:
        child = os.fork()
        if not child:
            os._exit(len(gate.GATE._reading))
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_call_within_a_call_waits_for_a_capture_that_no_longer_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "PATIENCE_SECONDS", SOON)
    shared, captures, done, within = Gate(), threading.Event(), threading.Event(), threading.Event()

    def capture() -> None:
        with shared.capturing():
            captures.set()
            done.wait(LATE)

    def call() -> None:
        with shared:
            started(capture)
            assert captures.wait(LATE)
            with shared:
                within.set()

    thread = started(call)
    assert captures.wait(LATE)
    assert not within.wait(SOON)
    done.set()
    assert within.wait(LATE)
    thread.join(LATE)
