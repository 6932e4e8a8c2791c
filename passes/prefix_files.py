"""Outputs of a frozen prefix in a folder that later runs find, and other processes share."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save

from passes.prefix_store import Values
from passes.prefix_weights import content

PARTS = 64
"""The folder is looked through again when one process has added a part of this size to its files."""
STALE_SECONDS = 60.0
"""A file that is still being written after this time is one that a killed run left."""

log = logging.getLogger("rewrite")


class Files:
    """One safetensors file an example, written aside and moved into place, so that no reader sees half a file.

    A file holds a checksum of its key and values. What was used longest ago goes first, by the time of the file. A
    folder that cannot be written to is left at that, with a warning.
    """

    def __init__(self, folder: str, most_bytes: int) -> None:
        self.folder, self.most_bytes = Path(folder).expanduser(), most_bytes
        self.bytes = self.files = self.added = 0
        """Of all files when the folder was last looked through and since; their number then; how many since."""
        self.warned = False

    def get(self, key: str) -> Values | None:
        """See `Store`; a file that is damaged counts as none, and goes."""
        path = self._path(key)
        try:
            values = _read(key, path.read_bytes())
        except OSError:
            return None
        if values is None:
            _remove(path)
            return None
        _use(path)
        return values

    def put(self, key: str, values: Values) -> None:
        """See `Store`."""
        path, written = self._path(key), save(values, {"checksum": _checksum(key, values)})
        if len(written) > self.most_bytes or path.exists():
            return
        try:
            _write(path, written)
            self.bytes += len(written)
            self.added += 1
            if self.bytes > self.most_bytes or self.added > self.files // PARTS:
                self._trim()
        except OSError as error:
            if not self.warned:
                log.warning("the frozen prefix is not kept: %s cannot be written to (%s)", self.folder, error)
            self.warned = True

    def _trim(self) -> None:
        """Remove what is over the bound, and then a part more, to make room for what comes next."""
        there = sorted(self._there())
        total, over = sum(size for _, size, _ in there), 0
        while total > self.most_bytes:
            total -= there[over][1]
            over += 1
        gone = over + len(there) // PARTS if over else 0
        for _, _, path in there[:gone]:
            _remove(path)
        self.bytes, self.files, self.added = sum(size for _, size, _ in there[gone:]), len(there) - gone, 0

    def _there(self) -> Iterator[tuple[int, int, Path]]:
        """Time of use in nanoseconds, bytes and path of every file of ours; what killed runs left goes."""
        for path in self.folder.glob("??/*"):
            with contextlib.suppress(OSError):  # gone by now
                facts = path.stat()
                if path.suffix == ".safetensors":
                    yield facts.st_mtime_ns, facts.st_size, path
                elif path.suffix == ".part" and time.time() - facts.st_mtime > STALE_SECONDS:
                    _remove(path)

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"


def _read(key: str, written: bytes) -> Values | None:
    """The values in a file; None where they are not those that were written under `key`."""
    try:
        values = load(written)
        length = int.from_bytes(written[:8], "little")
        told = json.loads(written[8 : 8 + length]).get("__metadata__", {}).get("checksum")
    except (SafetensorError, ValueError, KeyError):
        return None
    return values if told == _checksum(key, values) else None


def _checksum(key: str, values: Values) -> str:
    made = hashlib.blake2b(key.encode(), digest_size=20)
    for name in sorted(values):
        made.update(name.encode() + content(values[name]))
    return made.hexdigest()


def _write(path: Path, written: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(written)
        os.replace(name, path)
    except BaseException:
        _remove(Path(name))
        raise
    _use(path)


def _use(path: Path) -> None:
    """Note that a file is used now, to the nanosecond; the file system's own clock is coarser."""
    now = time.time_ns()
    with contextlib.suppress(OSError):
        os.utime(path, ns=(now, now))


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
