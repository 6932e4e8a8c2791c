"""What is told beside the result: notes, progress and errors, on stderr."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import click

from rewrite.errors import RewriteError

PATIENCE = 1.0
"""Seconds of work that pass before anything is shown about it."""
SCREEN = 30
"""Lines an error may take."""


class Narration:
    """The voice of one run of the command line."""

    def __init__(self) -> None:
        self.quiet = False
        self.verbose = False

    def note(self, text: str) -> None:
        """Something worth knowing, unless the user asked for quiet."""
        if not self.quiet:
            self.error(text)

    def error(self, text: str) -> None:
        sys.stdout.flush()
        click.echo(text, err=True)

    @contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Show that `what` is being done, on a terminal, once it has taken a second."""
        started = time.perf_counter()
        spinner = Spinner(what) if sys.stderr.isatty() and not self.quiet else None
        try:
            yield
        finally:
            if spinner is not None:
                spinner.stop()
        if self.verbose:
            self.error(f"{what}: {time.perf_counter() - started:.1f} s")

    def usage(self, error: click.ClickException) -> None:
        """Bad usage: the message and where help is."""
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            self.error(error.format_message())
            return
        context = getattr(error, "ctx", None)
        self.error(f"error: {error.format_message()}")
        if context is not None:
            self.error(f"Next: {context.command_path} --help")

    def fault(self, error: RewriteError) -> None:
        """An expected failure, in one screen; the traceback only when asked for."""
        self.trace(error)
        self.error(one_screen(f"error: {error}"))

    def internal(self, error: BaseException) -> None:
        """A failure nobody expected."""
        self.trace(error)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        told = " ".join(str(error).split())
        self.error(one_screen(f"error: internal fault: {type(error).__name__}: {told[:600]}"))
        self.error(f"  raised in {frame.name}, line {frame.lineno} of {frame.filename}")
        self.error("Next: run again with -v for the traceback, and report it with the command you ran")

    def trace(self, error: BaseException) -> None:
        if self.verbose:
            self.error("".join(traceback.format_exception(error)))


class Spinner:
    """A line on the terminal that turns while work lasts; nothing for work that is over at once."""

    def __init__(self, what: str) -> None:
        self._over = threading.Event()
        self._what = what
        self._thread = threading.Thread(target=self._turn, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take the line away."""
        self._over.set()
        self._thread.join()

    def _turn(self) -> None:
        if self._over.wait(PATIENCE):
            return
        from rich.console import Console

        console = Console(stderr=True, highlight=False, markup=False)
        with console.status(self._what):
            self._over.wait()


def one_screen(text: str) -> str:
    """The first lines of `text`, its last one kept."""
    lines = text.splitlines()
    if len(lines) <= SCREEN:
        return text
    return "\n".join([*lines[: SCREEN - 2], "  ...", lines[-1]])
