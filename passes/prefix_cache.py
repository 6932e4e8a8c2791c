"""Keep what the frozen prefix of a model gives for each example, and give it back when the example comes again.

The key of an example is a hash of its row of every input of the prefix, of the weights and buffers that the prefix
reads, and of its code. Rows are only kept once one has been seen to give the same among other rows.
"""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from passes.prefix_store import Store, Values

Function = Callable[..., tuple[Any, ...]]

TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far a row may be from itself in another batch, in parts of its largest number; for wider types 1e-4."""

log = logging.getLogger("rewrite")


@dataclass(frozen=True, eq=False)
class PrefixCache:
    """The prefix of one graph: nodes tagged `WITHIN` it run through `around`."""

    store: Store
    dear: tuple[str, ...]
    """The nodes whose values are kept."""
    rows: tuple[str, ...]
    """The inputs that hold one row an example."""
    paths: tuple[str, ...]
    """The modules that the prefix calls."""
    attributes: tuple[str, ...]
    """The parameters and buffers that it reads beside them."""
    code: str
    """What its nodes do, as text."""
    modes: tuple[bool, ...]
    """The modes of its modules, in which it draws no random numbers."""

    def __repr__(self) -> str:
        return f"cached({', '.join(self.dear)})"

    def around(
        self, compiled: Callable[[Sequence[str]], Function], inputs: tuple[str, ...], outputs: tuple[str, ...]
    ) -> Function:
        """See `rewrite.emit.detached.Around`."""
        dear = tuple(name for name in outputs if name in self.dear)
        light = tuple(name for name in outputs if name not in self.dear)
        places = tuple((dear.index(name), True) if name in dear else (light.index(name), False) for name in outputs)
        by_row = tuple(name in self.rows for name in inputs)
        return Cached(self, compiled(dear), compiled(light), dear, places, by_row, compiled(outputs))


class Cached:
    """The prefix as a function `(module, *inputs)`."""

    def __init__(
        self,
        cache: PrefixCache,
        dear: Function,
        light: Function,
        names: tuple[str, ...],
        places: tuple[tuple[int, bool], ...],
        by_row: tuple[bool, ...],
        whole: Function,
    ) -> None:
        self.cache, self.dear, self.light, self.whole = cache, dear, light, whole
        self.names, self.places, self.by_row = names, places, by_row
        self.independent: bool | None = None
        """Whether rows were seen to be independent; None before one was looked at."""
        self.state: tuple[Any, ...] = ()
        self.weights = ""

    def __call__(self, module: nn.Module, *inputs: Any) -> tuple[Any, ...]:
        if not self._applies(module, inputs):
            return self.whole(module, *inputs)
        with torch.no_grad():
            light = self.light(module, *inputs)
            dear = self._dear(module, inputs)
        return tuple((dear if is_dear else light)[place] for place, is_dear in self.places)

    def _applies(self, module: nn.Module, inputs: tuple[Any, ...]) -> bool:
        """Whether the prefix is still frozen, and as it was captured; plans are made on fakes, which hold nothing."""
        given = [each for each in inputs if isinstance(each, torch.Tensor)]
        if self.independent is False or any(isinstance(each, FakeTensor) or each.requires_grad for each in given):
            return False
        modules = [inner for path in self.cache.paths for inner in module.get_submodule(path).modules()]
        if tuple(inner.training for inner in modules) != self.cache.modes:
            return False
        read = [operator.attrgetter(name)(module) for name in self.cache.attributes]
        tensors = [*_tensors(modules), *read]
        if any(tensor.requires_grad or isinstance(tensor, FakeTensor) for tensor in tensors):
            return False
        state = tuple((id(tensor), tensor._version) for tensor in tensors)
        if state != self.state:
            self.weights, self.state = _digest(tensors), state
        return True

    def _dear(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        keys = self._keys(inputs)
        found = [self.cache.store.get(key) for key in keys]
        device = next((each.device for each in inputs if isinstance(each, torch.Tensor)), torch.device("cpu"))
        kept = [values for values in found if values is not None]
        if keys and len(kept) == len(keys):
            return tuple(torch.stack([values[name] for values in kept]).to(device) for name in self.names)
        made = self.dear(module, *inputs)
        if keys and self._may_keep(module, inputs, made):
            for row, (key, values) in enumerate(zip(keys, found, strict=True)):
                if values is None:
                    self.cache.store.put(key, self._row(made, row))
        return made

    def _row(self, made: Sequence[torch.Tensor], row: int) -> Values:
        return {name: value[row].detach().to("cpu", copy=True) for name, value in zip(self.names, made, strict=True)}

    def _may_keep(self, module: nn.Module, inputs: tuple[Any, ...], made: Sequence[torch.Tensor]) -> bool:
        """Whether a row's values are its own, seen once: those of the first row in a batch of nothing but it."""
        if self.independent is None:
            rows = made[0].shape[0] + 1  # another size too, and not 1, for which code may be made apart
            alike = [each[:1].expand(rows, *each.shape[1:]).clone() if row else each
                     for each, row in zip(inputs, self.by_row, strict=True)]  # fmt: skip
            again = self.dear(module, *alike)
            self.independent = all(map(_close, (each[0] for each in again), (each[0] for each in made)))
            if not self.independent:
                log.warning("the frozen prefix is not cached: its values for an example depend on others in the batch")
        return self.independent

    def _keys(self, inputs: tuple[Any, ...]) -> list[str]:
        """One key a row; none when there is no row."""
        tensors = [each for each, row in zip(inputs, self.by_row, strict=True) if row]
        shared = hashlib.blake2b(f"{self.cache.code}{self.weights}{_surroundings()}".encode(), digest_size=20)
        for each, row in zip(inputs, self.by_row, strict=True):
            if not row:
                shared.update(content(each) if isinstance(each, torch.Tensor) else repr(each).encode())
        rows = [each.detach().cpu().contiguous() for each in tensors]
        keys = []
        for place in range(len(rows[0]) if rows else 0):
            key = shared.copy()
            for each in rows:
                key.update(content(each[place]))
            keys.append(key.hexdigest())
        return keys


def _tensors(modules: Sequence[nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        for table in (module._parameters, module._buffers):
            yield from (tensor for tensor in table.values() if tensor is not None)


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=20)
    for tensor in tensors:
        digest.update(content(tensor))
    return digest.hexdigest()


def content(tensor: torch.Tensor) -> bytes:
    """Type, shape and numbers of a tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    content = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{tensor.dtype}{tuple(tensor.shape)}".encode() + content


def _surroundings() -> str:
    kinds = ("cpu", "cuda")
    return str([torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds])


def _close(alone: torch.Tensor, among: torch.Tensor) -> bool:
    if not alone.is_floating_point():
        return torch.equal(alone, among)
    limit = TOLERANCE.get(alone.dtype, 1e-4) * float(among.abs().max()) if among.numel() else 0.0
    return alone.shape == among.shape and bool(((alone - among).abs() <= limit).all())
