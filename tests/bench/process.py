"""A function run in a process of its own: what it returns, or a sentence about why it could not."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar
from unittest import mock

Result = TypeVar("Result")

QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
REASON_LENGTH = 200
GOODBYE_SECONDS = 20


@dataclass(frozen=True)
class Failure:
    """Why there is no result."""

    reason: str


def in_own_process(
    function: Callable[..., Result],
    *arguments: Any,
    environment: Mapping[str, str],
    seconds: float,
) -> Result | Failure:
    """Call `function` with one thread in a new process that starts with `environment`, for at most `seconds`."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(there, function, arguments), daemon=True)
    with mock.patch.dict(os.environ, {**QUIET, **environment}):
        process.start()
    there.close()
    try:
        if not here.poll(seconds):
            return Failure(f"took longer than {seconds:.0f} s")
        answer: Result | Failure = here.recv()
        process.join(GOODBYE_SECONDS)
        return answer
    except EOFError:
        process.join()
        return Failure(_ended(process.exitcode or 0))
    finally:
        process.kill()
        process.join()
        here.close()


def _answer(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # libraries warn and log there; the answer goes through the connection
        os.dup2(silence, stream)
    import torch

    torch.set_num_threads(1)
    try:
        answer = function(*arguments)
    except Exception as error:  # whatever a method raises is why its row is empty
        answer = Failure(reason_text(error))
    connection.send(answer)


def reason_text(error: Exception) -> str:
    """The error in one line: its kind, unless it is ours to begin with, and the first line it has."""
    from rewrite import RewriteError
    from tests.bench.workload import UnavailableError

    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    told = first if isinstance(error, (RewriteError, UnavailableError)) else f"{type(error).__name__}: {first}"
    return told if len(told) <= REASON_LENGTH else f"{told[: REASON_LENGTH - 2]}.."


def _ended(code: int) -> str:
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with code {code}"
