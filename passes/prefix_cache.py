"""Keep what the frozen prefix of a model gives for each example, and give it back when the example comes again.

The key of an example is a hash of its row of every input of the prefix, of the weights and buffers that the prefix
reads, and of its code. Rows are only kept once one has been seen to give the same among other rows.
"""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from passes.prefix_rows import rows_are_independent
from passes.prefix_store import Store, Values
from passes.prefix_weights import Weights, content, tensors_of

Function = Callable[..., tuple[Any, ...]]

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
        self.weights = Weights()

    def __call__(self, module: nn.Module, *inputs: Any) -> tuple[Any, ...]:
        weights = self._weights(module, inputs)
        if weights is None:
            return self.whole(module, *inputs)
        with torch.no_grad():
            light = self.light(module, *inputs)
            dear = self._dear(module, inputs, self.weights.digest(weights))
        return tuple((dear if is_dear else light)[place] for place, is_dear in self.places)

    def _weights(self, module: nn.Module, inputs: tuple[Any, ...]) -> list[torch.Tensor] | None:
        """What the prefix reads of the module; None where it is to run as it is, without the store.

        That is where it is not frozen any more, or in another mode, or where rows depend on one another. Plans are made
        on fakes, which hold nothing.
        """
        given = [each for each in inputs if isinstance(each, torch.Tensor)]
        if self.independent is False or any(isinstance(each, FakeTensor) or each.requires_grad for each in given):
            return None
        modules = [inner for path in self.cache.paths for inner in module.get_submodule(path).modules()]
        if tuple(inner.training for inner in modules) != self.cache.modes:
            return None
        tensors = [*tensors_of(modules), *(operator.attrgetter(name)(module) for name in self.cache.attributes)]
        odd = any(each.requires_grad or isinstance(each, FakeTensor) for each in tensors)
        return None if odd else tensors

    def _dear(self, module: nn.Module, inputs: tuple[Any, ...], weights: str) -> tuple[torch.Tensor, ...]:
        keys = self._keys(inputs, weights)
        found = [self.cache.store.get(key) for key in keys]
        device = next((each.device for each in inputs if isinstance(each, torch.Tensor)), torch.device("cpu"))
        kept = [values for values in found if values is not None]
        if keys and len(kept) == len(keys):
            return tuple(torch.stack([values[name] for values in kept]).to(device) for name in self.names)
        made = self.dear(module, *inputs)
        if len(set(keys)) > 1 and self._may_keep(module, inputs, made):
            for row, (key, values) in enumerate(zip(keys, found, strict=True)):
                if values is None:
                    self.cache.store.put(key, self._row(made, row))
        return made

    def _row(self, made: Sequence[torch.Tensor], row: int) -> Values:
        return {name: value[row].detach().to("cpu", copy=True) for name, value in zip(self.names, made, strict=True)}

    def _may_keep(self, module: nn.Module, inputs: tuple[Any, ...], made: Sequence[torch.Tensor]) -> bool:
        """Whether rows were seen to be independent, in the first batch of examples that differ."""
        if self.independent is None:
            self.independent = rows_are_independent(partial(self.dear, module), inputs, self.by_row, made)
            if not self.independent:
                log.warning("the frozen prefix is not cached: its values for an example depend on others in the batch")
        return self.independent

    def _keys(self, inputs: tuple[Any, ...], weights: str) -> list[str]:
        """One key a row; none when there is no row."""
        tensors = [each for each, row in zip(inputs, self.by_row, strict=True) if row]
        shared = hashlib.blake2b(f"{self.cache.code}{self.names}{weights}{_surroundings()}".encode(), digest_size=20)
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


def _surroundings() -> str:
    kinds = ("cpu", "cuda")
    return str([torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds])
