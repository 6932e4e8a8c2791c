"""What a region's graph depends on beside its arguments, as the members of the region stand now."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from rewrite import calls
from rewrite.capture.snapshot import Snapshot
from rewrite.capture.structure import PRIMITIVES, Structure, flags, has_hooks, members
from rewrite.identity import identity, stood_in

TORCHS = frozenset(vars(nn.Module()))
BOOK_KEEPING = TORCHS | {"forward", "train", "_replicate_for_data_parallel"}
MAX_ITEMS = 64
"""Longer lists and dicts of a module are taken to be data, not options."""


class Attributes:
    """Plain attributes of modules, by the table that holds them."""

    def __init__(self) -> None:
        self.plain: list[tuple[dict[str, Any], str]] = []
        self.tensors: list[tuple[dict[str, Any], str]] = []
        self.containers: list[tuple[dict[str, Any], str]] = []
        self.options: dict[int, dict[str, Any]] = {}

    def add(self, table: dict[str, Any], name: str, value: Any) -> None:
        """Watch the attribute, if its kind of value can be."""
        if isinstance(value, PRIMITIVES):
            self.plain.append((table, name))
        elif isinstance(value, torch.Tensor):
            self.tensors.append((table, name))
        elif type(value) in (list, tuple, dict) and len(value) <= MAX_ITEMS:
            self.containers.append((table, name))
        elif not isinstance(value, (nn.Module, type)) and not callable(value) and hasattr(value, "__dict__"):
            self.options.setdefault(id(value), vars(value))

    def held(self) -> list[Any]:
        """The containers and options whose content counts."""
        return [*(table.get(name) for table, name in self.containers), *self.options.values()]

    def state(self) -> Hashable:
        """Their values as they are now; of tensors, which they are."""
        return (
            tuple([table.get(name) for table, name in self.plain]),
            tuple([identity(table.get(name)) for table, name in self.tensors]),
            tuple([_values(table.get(name)) for table, name in self.containers]),
            tuple([_values(options) for options in self.options.values()]),
        )


class Watch:
    """The members of one region and the plain attributes that their forwards may read.

    Attributes in which the region differs from its siblings are kept apart, in `own`: a graph that serves several of
    them has read none of these.
    """

    def __init__(self, module: nn.Module, path: str, structure: Structure) -> None:
        self.members = members(module, path, structure)
        inside = {id(member) for member in self.members}
        self.below = [inner for inner in module.modules() if id(inner) not in inside]
        self.children = [(member._modules, dict(member._modules)) for member in self.members]
        self.names = [(vars(member), len(vars(member))) for member in self.members]
        """How many attributes each has: one that came later, as trainers set on a model, is to be watched too."""
        self.classes = tuple((type(member), tuple(member._modules.keys())) for member in self.members)
        group = structure.blocks.get(path)
        hidden = structure.differing.get(group, set()) if group is not None else set()
        below = {id(inner): name for name, inner in module.named_modules()}
        self.shared, self.own = Attributes(), Attributes()
        for member in self.members:
            for name, value in vars(member).items():
                if name not in BOOK_KEEPING:
                    differs = (below.get(id(member), ""), name) in hidden
                    (self.own if differs else self.shared).add(vars(member), name, value)
        self.last: tuple[Snapshot, Hashable] | None = None
        """The state that was read last, and what it was read from."""

    def is_current(self) -> bool:
        """Whether the members still hold the modules they held, and no other attributes than they had."""
        return all(len(table) == count for table, count in self.names) and all(
            table.keys() == then.keys() and all(table[name] is then[name] for name in then)
            for table, then in self.children
        )

    def last_state(self) -> Hashable | None:
        """The last state, if nothing it was read from has changed, and the watch is current; otherwise None."""
        return self.last[1] if self.last is not None and self.last[0].holds() else None

    def state(self) -> Hashable:
        """Equal for two calls that one graph may serve."""
        state = self._state()
        if not stood_in():  # or stand-ins would live as long as what was read of them
            self.last = Snapshot(self.members, self.below, TORCHS - {"training"}, self.shared.held()), state
        return state

    def _state(self) -> Hashable:
        return (
            flags(self.members),
            tuple([index for index, inner in enumerate(self.below) if has_hooks(inner)]),
            self.classes,
            self.shared.state(),
            tuple([key for member in self.members if "forward" in vars(member) and (key := _patched(member))]),
        )


def _patched(member: nn.Module) -> int | None:
    """The identity of a forward that somebody put on the instance, ours (which says what was `given`) left out."""
    forward = vars(member)["forward"]
    forward = getattr(forward, "given", forward)
    return None if forward is None else id(forward)


def _values(held: Any) -> Hashable:
    """The plain values in a container or an options object, and the identity of tensors in it."""
    if isinstance(held, dict):
        return tuple([(name, _values(value)) for name, value in held.items() if isinstance(name, str)])
    if type(held) in (list, tuple):
        return tuple([_values(value) for value in held])
    if isinstance(held, torch.Tensor):
        return identity(held)
    return held if isinstance(held, PRIMITIVES) else None


class Containers:
    """The lists and dicts that modules hold as attributes, to notice, and undo, what a forward does to them."""

    def __init__(self, modules: list[nn.Module]) -> None:
        held = [value for module in modules for name, value in vars(module).items() if name not in BOOK_KEEPING]
        self.held = [value for value in held if type(value) in (list, dict, set)]
        self.copies = [type(value)(value) for value in self.held]
        self.contents = [self._content(value) for value in self.held]

    def changed(self) -> bool:
        """Whether any of them holds other things now."""
        return [self._content(value) for value in self.held] != self.contents

    def put_back(self) -> None:
        """Give them the content they had."""
        if not self.changed():
            return
        for value, copy in zip(self.held, self.copies, strict=True):
            value.clear()
            value.extend(copy) if isinstance(value, list) else value.update(copy)

    def _content(self, value: Any) -> Hashable:
        return frozenset(map(id, value)) if isinstance(value, set) else calls.contents(value)
