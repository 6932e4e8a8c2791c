"""Copies of weights in another precision, each made once for as long as the weight keeps its values.

A copy serves every forward, recompute and micro-batch until the weight changes. An in-place write is seen by the
version that autograd counts, another storage by its address. A write through `.data`, or by a sharding engine that
gathers a weight anew, leaves no such trace, so the first call of a forward compares a projection of every weight that
has a copy with the one taken when the copy was made: a read of the weights, a fraction of what casting them costs.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_numbers = itertools.count(1)


class _Copy:
    """What is held for one weight and one dtype."""

    __slots__ = ("address", "projection", "round", "tensor", "version", "weight")

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, key: tuple[int, torch.dtype]) -> None:
        self.weight = weakref.ref(weight, lambda _: _copies.pop(key, None))
        self.round = _State.round
        self.version, self.address = weight._version, _address(weight)
        with torch.inference_mode(False), torch.no_grad():
            self.tensor = weight.detach().to(dtype)
        self.projection = _projection(weight)

    def looks_current(self, weight: torch.Tensor) -> bool:
        """Whether nothing that leaves a trace has happened to the weight."""
        return self.weight() is weight and self.version == weight._version and self.address == _address(weight)


_copies: dict[tuple[int, torch.dtype], _Copy] = {}
_emptied: set[int] = set()
"""Weights, by identity, that a sharding engine empties between uses: a copy of one would undo the sharding."""


class _State:
    """The number of the outermost call of optimized code that runs, or ran last."""

    round = 0


def next_round() -> None:
    """An outermost call of optimized code begins: weights may have changed since the last.

    A weight whose storage is empty now is one of a sharding engine's, which gathers it when its block runs.
    """
    _State.round = next(_numbers)
    for key, copy in list(_copies.items()):
        weight = copy.weight()
        if weight is not None and weight.numel() > 0 and not _has_storage(weight):
            _copies.pop(key, None)
            _emptied.add(key[0])
            weakref.finalize(weight, _emptied.discard, key[0])


def cast_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`weight.to(dtype)`, computed again only when the weight has changed; a gradient flows back to the weight.

    `weight` is a parameter or buffer; a tensor with a history is cast at each call. The result is not to be written.
    """
    if weight.dtype == dtype:
        return weight
    if weight.grad_fn is not None or weight.is_inference() or torch.compiler.is_compiling() or _is_sharded(weight):
        return weight.to(dtype)
    copy = _current(weight, dtype)
    if torch.is_grad_enabled() and weight.requires_grad:
        result: torch.Tensor = _Cast.apply(weight, copy)  # type: ignore[no-untyped-call]
        return result
    return copy.detach()


def projections(tensors: Iterable[torch.Tensor]) -> tuple[float, ...]:
    """A number for each tensor, which a write through `.data` changes too; one wait for each device.

    It is a sum over the tensor, in its own precision, with weights without a pattern: a change below the rounding of
    that sum is not seen. 0 for a tensor without content.
    """
    found = [_projection(each) for each in tensors]
    numbers = [0.0] * len(found)
    for device in {each.device for each in found if each is not None}:
        places = [place for place, each in enumerate(found) if each is not None and each.device == device]
        together = torch.stack([each for each in found if each is not None and each.device == device])
        for place, number in zip(places, together.tolist(), strict=True):
            numbers[place] = number
    return tuple(numbers)


def copies() -> Iterator[torch.Tensor]:
    """Every copy that is held."""
    return (copy.tensor for copy in list(_copies.values()))


class _Cast(torch.autograd.Function):
    """The cast as autograd sees it: gradients go on in the weight's own precision."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].to(ctx.dtype), None


def _current(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    key = (id(weight), dtype)
    found = _copies.get(key)
    if found is not None and found.looks_current(weight) and found.round != _State.round:
        _check_all(weight.device)
        found = _copies.get(key)
    if found is not None and found.looks_current(weight):
        return found.tensor
    _copies.pop(key, None)
    del found  # so that the old copy goes before the new one is made
    made = _Copy(weight, dtype, key)
    _copies[key] = made
    return made.tensor


def _check_all(device: torch.device) -> None:
    """Drop the copies on a device whose weight has other values than it had; one wait for the device, not one each."""
    checked: list[tuple[tuple[int, torch.dtype], _Copy, torch.Tensor]] = []
    for key, copy in list(_copies.items()):
        weight = copy.weight()
        if weight is None or weight.device != device or copy.round == _State.round or not _has_storage(weight):
            continue
        copy.round = _State.round
        now = _projection(weight)
        if now is not None and copy.projection is not None:
            checked.append((key, copy, now))
    if not checked:
        return
    pairs = [torch.stack([now, copy.projection]) for _, copy, now in checked]  # type: ignore[list-item]
    for (key, _, _), (now, then) in zip(checked, torch.stack(pairs).tolist(), strict=True):
        if now != then:
            _copies.pop(key, None)


def _is_sharded(weight: torch.Tensor) -> bool:
    return id(weight) in _emptied or type(weight).__name__ == "DTensor"


def _has_storage(weight: torch.Tensor) -> bool:
    return weight.untyped_storage().nbytes() > 0


def _address(weight: torch.Tensor) -> int:
    return 0 if isinstance(weight, FakeTensor) or weight.is_meta else weight.data_ptr()


def _projection(weight: torch.Tensor) -> torch.Tensor | None:
    """A number that any write changes but one below the rounding of a sum over the weight; None for a fake."""
    if isinstance(weight, FakeTensor) or weight.is_meta or weight.numel() == 0:
        return None
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        values = weight.detach().as_subclass(torch.Tensor)
        values = torch.view_as_real(values) if values.is_complex() else values
        values = values if values.is_floating_point() and values.itemsize > 1 else values.float()
        rows = values.reshape(values.shape[0], -1) if values.dim() > 1 else values.reshape(1, -1)
        return (rows.mv(_probe(rows, 1)) * _probe(rows, 0)).sum(dtype=torch.float64)


def _probe(rows: torch.Tensor, dim: int) -> torch.Tensor:
    found = _weights_of(rows.shape[dim], dim, rows.device, rows.dtype)
    if isinstance(found, FakeTensor):  # made within somebody's fake mode
        _weights_of.cache_clear()
    return found


@functools.lru_cache(maxsize=64)
def _weights_of(length: int, dim: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Weights without a pattern, so that sums of permuted, transposed or negated values differ; none is 0."""
    places = torch.arange(1, length + 1, device=device, dtype=torch.float32)
    return places.mul_((1.189207, 2.399963)[dim]).sin_().to(dtype)
