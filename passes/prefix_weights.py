"""The numbers of the weights and buffers that a frozen prefix reads, as one text for as long as they stay."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rewrite import projections


class Weights:
    """A digest of some tensors, made anew when one of them has changed.

    An in-place write is seen by the version that autograd counts. One through `.data` leaves no such trace, so each
    look compares a projection of every tensor too: a read of the weights, a fraction of what their products cost.
    """

    def __init__(self) -> None:
        self.state: tuple[Any, ...] = ()
        self.known = ""

    def digest(self, tensors: Sequence[torch.Tensor]) -> str:
        """Of the contents of `tensors`, in their order."""
        traces = ((id(each), None if each.is_inference() else each._version) for each in tensors)
        state = (*traces, *projections(tensors))
        if state != self.state:
            self.known, self.state = _digest(tensors), state
        return self.known


def tensors_of(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Parameters and buffers."""
    for module in modules:
        held = (*module._parameters.values(), *module._buffers.values())
        yield from (tensor for tensor in held if tensor is not None)


def content(tensor: torch.Tensor) -> bytes:
    """Type, shape and numbers of a tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    numbers = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{tensor.dtype}{tuple(tensor.shape)}".encode() + numbers


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    made = hashlib.blake2b(digest_size=20)
    for tensor in tensors:
        made.update(content(tensor))
    return made.hexdigest()
