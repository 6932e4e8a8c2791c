"""Which tensor a model holds, also while a stand-in is in its place: code made for the one serves for the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_stood_for: dict[int, int] = {}
"""`id` of each stand-in -> that of the tensor whose place it takes."""


def identity(value: Any) -> int:
    """The `id` of the tensor that `value` is or stands for."""
    return _stood_for.get(id(value), id(value)) if _stood_for else id(value)


@contextmanager
def standing_for(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Within the block the second of each pair stands for the first. Both are to live as long."""
    added = {id(made): id(tensor) for tensor, made in pairs}
    _stood_for.update(added)
    try:
        yield
    finally:
        for made in added:
            _stood_for.pop(made, None)
