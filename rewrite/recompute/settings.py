"""A recompute runs layers as they were set in the forward: in training or not, with the same options."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from rewrite.recompute.layers import Layers

_KINDS = (bool, int, float, str, type(None), torch.dtype)


class Settings:
    """The plain attributes of some layers as they are now."""

    __slots__ = ("names", "tables", "values")

    def __init__(self, layers: Layers) -> None:
        self.tables, self.names = layers.options
        self.values = [*map(dict.get, self.tables, self.names)]

    def changed(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Attributes that are others now: for each layer its table, and what it held."""
        if all(map(operator.is_, map(dict.get, self.tables, self.names), self.values)):
            return []
        rows = zip(self.tables, self.names, self.values, strict=True)
        return [(table, {name: then}) for table, name, then in rows if _is_other(then, table.get(name))]


class Modes:
    """Whether some modules, which may hold anything as attributes, are in training now."""

    __slots__ = ("held",)

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        tables = (vars(module) for module in modules)
        self.held = [(table, table["training"]) for table in tables if "training" in table]  # a scripted one has none

    def changed(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Those that are not as they were: for each its table, and what it held."""
        return [(table, {"training": mode}) for table, mode in self.held if table["training"] is not mode]


@contextlib.contextmanager
def as_set(changed: list[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[None]:
    """Within the block the tables hold what they held."""
    now = [(table, {name: table[name] for name in before if name in table}) for table, before in changed]
    for table, before in changed:
        table.update(before)
    try:
        yield
    finally:
        for (table, before), (_, found) in zip(changed, now, strict=True):
            for name in before.keys() - found.keys():  # somebody had deleted it
                del table[name]
            table.update(found)


def _is_other(then: Any, now: Any) -> bool:
    if not _is_plain(then) or then is now:
        return False
    return not _is_plain(now) or bool(then != now)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _KINDS) or (isinstance(value, tuple) and all(map(_is_plain, value)))
