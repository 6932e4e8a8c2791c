"""The result of a command: on stdout, or in a file that is written whole or not at all."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from rewrite.errors import InputError
from rewrite.report.documents import document_text

PIPE_WIDTH = 80


@dataclass(frozen=True)
class Output:
    """Where the result goes and how it looks."""

    path: Path | None = None
    color: str = "auto"
    json: bool = False
    force: bool = False

    @property
    def wants_json(self) -> bool:
        """Asked for, or the file is named so."""
        return self.json or (self.path is not None and self.path.suffix == ".json")

    @property
    def width(self) -> int:
        """Columns to fill: the terminal's, else `COLUMNS`, else 80."""
        if self.path is None and sys.stdout.isatty():
            return max(40, Console().width)
        columns = os.environ.get("COLUMNS", "")
        return max(40, int(columns)) if columns.isdigit() else PIPE_WIDTH

    def check(self) -> None:
        """Raise `InputError` before any work when the file cannot be written."""
        if self.path is None:
            return
        if self.path.exists() and not self.force:
            raise InputError(f"-o {self.path}", "the file exists", "give another name, or --force to replace it")
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise InputError(f"-o {self.path}", "is no file in an existing directory", "make the directory first")

    def document(self, document: Mapping[str, Any]) -> None:
        """Write a JSON document."""
        self._write(document_text(document))

    def lines(self, lines: Iterable[Text]) -> None:
        """Write text, in colour where the stream shows it."""
        colored = self.path is None and use_color(self.color, sys.stdout, os.environ)
        buffer = io.StringIO()
        console = Console(
            file=buffer,
            width=self.width,
            color_system="standard" if colored else None,
            force_terminal=colored,
            no_color=not colored,
            legacy_windows=False,
            highlight=False,
            _environ={},
        )
        for line in lines:
            console.print(line, soft_wrap=True)
        self._write(buffer.getvalue())

    def _write(self, text: str) -> None:
        if self.path is None:
            sys.stdout.write(printable(text, sys.stdout))
            return
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        os.chmod(file.name, 0o666 & ~_umask())
        os.replace(file.name, self.path)


def use_color(choice: str, stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether to colour: `--color` decides, else `NO_COLOR`, else `FORCE_COLOR`, else whether it is a terminal."""
    if choice != "auto":
        return choice == "always"
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return stream.isatty() and environ.get("TERM") != "dumb"


def printable(text: str, stream: TextIO) -> str:
    """`text` without the characters that the stream cannot encode."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
