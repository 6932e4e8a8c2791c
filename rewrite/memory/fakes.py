"""Stand-ins for the tensors of a module tree, and the module exactly as it was afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from rewrite.errors import InputError
from rewrite.identity import standing_for
from rewrite.memory.quick import QuickFakes, meta_storage


class Convert(Protocol):
    """Makes the stand-in of one tensor; the same stand-in for the same tensor."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in."""

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(original, stand-in) of every tensor converted."""


_CONTAINERS = (list, dict, set)


class FakeTensors:
    """Makes fake CPU tensors, whatever device (meta too) the originals are on.

    Fake CUDA and fake meta tensors that require grad are never made: they can abort the process. Tensors that share
    a storage get fakes that share one.
    """

    def __init__(self, quick: QuickFakes) -> None:
        self._quick = quick
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self._made.get(id(tensor))
        if found is not None:
            return found[1]
        fake = self._fake(tensor)
        fake.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            fake._is_param = True  # `nn.Parameter` does this to a tensor of another class, after an operator
        self._made[id(tensor)] = (tensor, fake)
        return fake

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(original, fake) of every tensor converted."""
        return iter(self._made.values())

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            raise InputError(
                f"a tensor of shape {tuple(tensor.shape)}",
                f"its layout is {tensor.layout}, and only dense (strided) tensors have fakes",
                "convert it with to_dense(), or measure with real=True",
            )
        storage = tensor.untyped_storage()
        entry = self._storages.get(storage._cdata)
        if entry is None:
            entry = self._storages[storage._cdata] = (storage, meta_storage(storage.nbytes()))
        return self._quick.tensor(tensor.shape, tensor.stride(), tensor.dtype, entry[1], int(tensor.storage_offset()))


class Clones:
    """Makes real copies, so that a real step leaves the originals alone."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self._made.get(id(tensor))
        if found is not None:
            return found[1]
        if tensor.is_meta:
            raise InputError(
                f"a tensor of shape {tuple(tensor.shape)}",
                "it is on the meta device, so there is no data to run a real step on",
                "measure on fakes (real=False), or load the weights first",
            )
        if tensor.layout != torch.strided:
            clone = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            self._made[id(tensor)] = (tensor, clone)
            return clone
        storage = tensor.untyped_storage()
        entry = self._storages.setdefault(storage._cdata, (storage, storage.clone()))
        clone = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        clone.set_(entry[1], tensor.storage_offset(), tensor.shape, tensor.stride())
        clone.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            clone = nn.Parameter(clone.detach(), tensor.requires_grad)
        self._made[id(tensor)] = (tensor, clone)
        return clone

    def pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(original, clone) of every tensor converted."""
        return iter(self._made.values())


@contextmanager
def swapped(root: nn.Module, convert: Convert) -> Iterator[None]:
    """Put stand-ins where the tensors of a module tree are; leave every module's attributes as they were.

    Parameters, buffers, plain tensor attributes, and tensors in lists, tuples and dicts among the attributes. What
    the block changes in the modules (attributes, buffers, containers) is undone.
    """
    saved = [(module, Attributes(module)) for module in root.modules()]
    try:
        for module, _ in saved:
            for name, value in list(module.__dict__.items()):
                if name != "_modules":
                    module.__dict__[name] = _converted(value, convert)
        with standing_for(list(convert.pairs())):
            yield
    finally:
        for module, attributes in saved:
            attributes.restore(module)


@contextmanager
def same_random_state() -> Iterator[None]:
    """Python's, numpy's and torch's generators continue after the block as if it had not run."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(state)


class Attributes:
    """A module's `__dict__` with the contents of the plain containers in it."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = dict(module.__dict__)
        self._contents: list[tuple[Any, Any]] = []
        for value in self._attributes.values():
            self._note(value)

    def _note(self, value: Any) -> None:
        if type(value) in (list, set):
            self._contents.append((value, list(value)))
        elif isinstance(value, dict):
            self._contents.append((value, dict(value)))
            for item in value.values():
                if type(item) in _CONTAINERS:
                    self._note(item)

    def restore(self, module: nn.Module) -> None:
        module.__dict__.clear()
        module.__dict__.update(self._attributes)
        for container, content in self._contents:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)


def _converted(value: Any, convert: Convert) -> Any:
    """The value with stand-ins for its tensors: a dict of the module's own is changed in place, the rest is copied."""
    if isinstance(value, torch.Tensor):
        return convert(value)
    if isinstance(value, dict):
        for key, item in list(value.items()):
            changed = _converted(item, convert)
            if changed is not item:
                value[key] = changed
        return value
    if type(value) in (list, tuple) and any(isinstance(item, torch.Tensor) for item in value):
        return type(value)(_converted(item, convert) for item in value)
    return value
