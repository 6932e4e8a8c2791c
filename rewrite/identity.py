"""Which tensor a model holds, also while a stand-in is in its place: code made for the one serves for the other."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch


class _Local(threading.local):
    """Of one thread: another may run a model whose code holds the same tensors."""

    stood_for: ClassVar[dict[int, int]] = {}
    """`id` of each stand-in -> that of the tensor whose place it takes."""
    stand_ins: ClassVar[dict[int, torch.Tensor]] = {}
    """`id` of a tensor -> what stands in its place."""


_local = _Local()


def identity(value: Any) -> int:
    """The `id` of the tensor that `value` is or stands for."""
    return _local.stood_for.get(id(value), id(value))


def stood_in() -> bool:
    """Whether stand-ins are in the place of some model's tensors."""
    return bool(_local.stood_for)


def present(value: Any) -> Any:
    """What stands in the place of `value`, or `value`."""
    return _local.stand_ins.get(id(value), value)


@contextmanager
def standing_for(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Within the block the second of each pair stands for the first. Both are to live as long."""
    pairs = list(pairs)
    before = _local.stood_for, _local.stand_ins
    vars(_local)["stood_for"] = {**before[0], **{id(made): id(tensor) for tensor, made in pairs}}
    vars(_local)["stand_ins"] = {**before[1], **{id(tensor): made for tensor, made in pairs}}
    try:
        yield
    finally:
        vars(_local)["stood_for"], vars(_local)["stand_ins"] = before
