"""Which tensor a model holds, also while a stand-in is in its place: code made for the one serves for the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_stood_for: dict[int, int] = {}
"""`id` of each stand-in -> that of the tensor whose place it takes."""
_stand_ins: dict[int, torch.Tensor] = {}
"""`id` of a tensor -> what stands in its place."""


def identity(value: Any) -> int:
    """The `id` of the tensor that `value` is or stands for."""
    return _stood_for.get(id(value), id(value)) if _stood_for else id(value)


def stood_in() -> bool:
    """Whether stand-ins are in the place of some model's tensors."""
    return bool(_stood_for)


def present(value: Any) -> Any:
    """What stands in the place of `value`, or `value`."""
    return _stand_ins.get(id(value), value) if _stand_ins else value


@contextmanager
def standing_for(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Within the block the second of each pair stands for the first. Both are to live as long."""
    global _stood_for, _stand_ins
    before = _stood_for, _stand_ins
    pairs = list(pairs)
    _stood_for = {**_stood_for, **{id(made): id(tensor) for tensor, made in pairs}}
    _stand_ins = {**_stand_ins, **{id(tensor): made for tensor, made in pairs}}
    try:
        yield
    finally:
        _stood_for, _stand_ins = before
