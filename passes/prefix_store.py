"""Where outputs of a frozen prefix are kept, by key and within a bound of bytes: in memory, or in files."""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

Values = dict[str, torch.Tensor]
"""Outputs for one example, by the name of the node that gives them; on the CPU."""


class Store(Protocol):
    """Keeps values up to a number of bytes; what was used longest ago goes first."""

    def get(self, key: str) -> Values | None:
        """The values kept under `key`, if they are there."""

    def put(self, key: str, values: Values) -> None:
        """Keep `values`, which are the store's own from here on."""


class Memory:
    """In this process."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self.held: OrderedDict[str, Values] = OrderedDict()

    def get(self, key: str) -> Values | None:
        """See `Store`."""
        found = self.held.get(key)
        if found is not None:
            self.held.move_to_end(key)
        return found

    def put(self, key: str, values: Values) -> None:
        """See `Store`."""
        size = _bytes(values)
        if key in self.held or size > self.most_bytes:
            return
        self.held[key] = values
        self.bytes += size
        while self.bytes > self.most_bytes:
            self.bytes -= _bytes(self.held.popitem(last=False)[1])

    def __getstate__(self) -> dict[str, int]:
        """A copy of the model in another process starts without values."""
        return {"most_bytes": self.most_bytes}

    def __setstate__(self, state: dict[str, int]) -> None:
        Memory.__init__(self, state["most_bytes"])

    def __deepcopy__(self, memo: object) -> Memory:
        """A copy of the model in this one shares them: keys tell its weights apart."""
        return self


class Files:
    """One safetensors file an example, written aside and moved into place, so that no reader sees half a file."""

    def __init__(self, folder: str, most_bytes: int) -> None:
        self.folder, self.most_bytes = Path(folder), most_bytes
        self.sizes: OrderedDict[str, int] | None = None

    def get(self, key: str) -> Values | None:
        """See `Store`; a file that cannot be read counts as none, and goes."""
        path = self._path(key)
        try:
            values = load(path.read_bytes())
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError):
            path.unlink(missing_ok=True)
            return None
        sizes = self._known()
        sizes.setdefault(key, path.stat().st_size if path.exists() else 0)
        sizes.move_to_end(key)
        return values

    def put(self, key: str, values: Values) -> None:
        """See `Store`."""
        sizes, content = self._known(), save(values)
        if key in sizes or len(content) > self.most_bytes:
            return
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        sizes[key] = len(content)
        while sum(sizes.values()) > self.most_bytes:
            oldest, _ = sizes.popitem(last=False)
            self._path(oldest).unlink(missing_ok=True)

    def _known(self) -> OrderedDict[str, int]:
        """Size of each file that is there, the oldest first; looked up once."""
        if self.sizes is None:
            found = [(path.stat(), path.stem) for path in self.folder.glob("??/*.safetensors")]
            found.sort(key=lambda each: each[0].st_mtime)
            self.sizes = OrderedDict((key, facts.st_size) for facts, key in found)
        return self.sizes

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"


def _bytes(values: Values) -> int:
    return sum(value.nbytes for value in values.values())
