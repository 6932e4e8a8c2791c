"""Tell cheaply that nothing a region's state is read from has changed, before any of it is read again."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from rewrite.capture.structure import PRIMITIVES

_kind_of = operator.attrgetter("dtype", "device", "requires_grad")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (dict, list, tuple)


class Snapshot:
    """The very objects that some modules, and some containers, held at one time.

    Compared by identity, so that C does the work: an equal object in the place of another counts as a change. Only
    primitives and containers are held for it; of anything else, which may be large, the `id`.
    """

    def __init__(self, members: Sequence[nn.Module], below: Sequence[nn.Module], ignored: frozenset[str],
                 held: Iterable[Any]) -> None:  # fmt: skip
        """`members` with their attributes but for those `ignored`; whether those `below` have hooks; `held`, and the
        containers in it."""
        tables = [table for member in members for table in (vars(member), member._modules, member._parameters)]
        own = [table for table in tables if isinstance(table, dict)]  # those of a scripted module lie in C++
        self.containers = [*own, *(inner for container in held for inner in _nested(container))]
        self.lengths = [*map(len, self.containers)]
        known, others, parameters = list[Any](), list[Any](), list[Any]()
        for container in self.containers:
            for key, value in [*_items(container)]:
                if isinstance(value, (*PRIMITIVES, *_CONTAINERS)):
                    if key not in ignored:
                        known.append((container, key, value))
                elif isinstance(value, nn.Module):
                    known.append((container, key, value))  # held anyway
                elif isinstance(value, nn.Parameter):
                    parameters.append((container, key, _kind_of(value)))
                elif key not in ignored:
                    others.append((container, key, id(value)))
        self.known, self.others, self.parameters = _columns(known), _columns(others), _columns(parameters)
        self.hooks = _columns([(vars(module), name) for module in (*members, *below) for name in _HOOKS], 2)

    def holds(self) -> bool:
        """Whether all is the same. With hooks it never is: which modules have any is for others to tell."""
        (tables, keys, values), (homes, names, ids), (owners, paths, kinds) = self.known, self.others, self.parameters
        try:
            return (
                not any(map(operator.getitem, *self.hooks))
                and [*map(len, self.containers)] == self.lengths
                and all(map(operator.is_, map(operator.getitem, tables, keys), values))
                and all(map(operator.eq, map(id, map(operator.getitem, homes, names)), ids))
                and all(map(operator.eq, map(_kind_of, map(operator.getitem, owners, paths)), kinds))
            )
        except (KeyError, AttributeError):  # one is gone, or what was a parameter is none
            return False


def _columns(rows: list[Any], width: int = 3) -> tuple[Any, ...]:
    return tuple(zip(*rows, strict=True)) if rows else ((),) * width


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _nested(held: Any) -> Iterator[Any]:
    """The container, and those in it at any depth."""
    if isinstance(held, _CONTAINERS):
        yield held
        for item in held.values() if isinstance(held, dict) else held:
            yield from _nested(item)
