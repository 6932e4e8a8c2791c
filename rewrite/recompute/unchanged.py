"""A recompute is only right from the weights and buffers of the forward: notice any that were changed or replaced."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rewrite.errors import RecomputeError
from rewrite.recompute.layers import Layers, Owners, modules_of, tables_of

_version = operator.attrgetter("_version")
_trained = operator.attrgetter("requires_grad")


class Weights:
    """The parameters and buffers of some modules, as they are now."""

    __slots__ = ("layers", "names", "tables", "tensors", "trained", "versions")

    def __init__(self, layers: Layers, written: Sequence[torch.Tensor] = ()) -> None:
        """`written` are buffers that the forward itself changes."""
        self.layers = layers
        self.tables, self.names = layers.tensors
        self.tensors: list[Any] = [*map(dict.get, self.tables, self.names)]
        try:
            self.versions = [*map(_version, self.tensors)]
        except (AttributeError, RuntimeError):  # one is None, or was made in inference mode
            written = [*written, *(each for each in self.tensors if each is None or each.is_inference())]
        if written:
            self._leave_out(set(map(id, written)))
        self.trained = [*map(_trained, self.tensors)]

    def _leave_out(self, others: set[int]) -> None:
        rows = [*zip(self.tables, self.names, self.tensors, strict=True)]
        held = [row for row in rows if id(row[2]) not in others]
        self.tables, self.names = tuple(table for table, _, _ in held), tuple(name for _, name, _ in held)
        self.tensors = [tensor for _, _, tensor in held]
        self.versions = [*map(_version, self.tensors)]

    def check(self, path: str, module: nn.Module, owners: Owners) -> None:
        """Raise RecomputeError if one that `owners` of `module` has, or one of them, was changed or replaced since.

        `module` is the region's at `path`. What other modules own may change: an optimizer may step in the backward.
        """
        if not self.layers.are_in(module):
            self._check_owners(path, module, owners(module))
        there = map(dict.get, self.tables, self.names)
        if all(map(operator.is_, there, self.tensors)) and [*map(_version, self.tensors)] == self.versions:
            return
        tables = tables_of(modules_of(owners(module)))
        read = {*map(id, tables), *(id(tensor) for table in tables for tensor in table.values())}
        for table, name, tensor, version in zip(self.tables, self.names, self.tensors, self.versions, strict=True):
            if id(table) not in read and id(tensor) not in read:
                continue
            found = table.get(name)
            if found is tensor and found._version != version:
                raise changed(path, f"{_named(module, table, name, tensor)} was changed in place")
            if found is not tensor and not any(type(each).__name__ == "DTensor" for each in (found, tensor)):
                raise changed(path, f"{_named(module, table, name, tensor)} was replaced")

    def _check_owners(self, path: str, module: nn.Module, owners: tuple[nn.Module, ...]) -> None:
        read, then = {*map(id, modules_of(owners))}, {*map(id, self.layers.all)}
        for name, layer in module.named_modules():
            if id(layer) in read - then:
                raise changed(path, f"layer {name!r} was replaced")

    @contextlib.contextmanager
    def trained_as_then(self) -> Iterator[None]:
        """Within the block the parameters that were trained are, and no others: operators save what these need."""
        pairs = zip(self.tensors, self.trained, strict=True)
        others = [(tensor, then) for tensor, then in pairs if tensor.is_leaf and tensor.requires_grad is not then]
        for tensor, then in others:
            tensor.requires_grad_(then)
        try:
            yield
        finally:
            for tensor, then in others:
                tensor.requires_grad_(not then)


def _named(module: nn.Module, table: Mapping[str, Any], name: str, tensor: Any) -> str:
    """What a tensor is, and its path below the region's module."""
    owners = (path for path, inner in module.named_modules() if table is inner._parameters or table is inner._buffers)
    kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
    return f"{kind} {'.'.join(filter(None, (next(owners, ''), name)))!r}"


def changed(path: str, what: str) -> RecomputeError:
    """The error for a recompute that would not give the values of the forward."""
    return RecomputeError(
        f"recompute of {path or 'the model'!r}",
        f"{what} between the forward and the backward that recomputes from it",
        "call backward before the optimizer step (or before the in-place change), or leave it out of Checkpoint",
    )
