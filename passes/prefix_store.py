"""Where outputs of a frozen prefix are kept, by key and within a bound of bytes; here in memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import torch

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


def _bytes(values: Values) -> int:
    return sum(value.nbytes for value in values.values())
