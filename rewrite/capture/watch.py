"""What a region's graph depends on beside its arguments, as the members of the region stand now."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from rewrite import calls
from rewrite.capture.structure import PRIMITIVES, Structure, flags, members, settings

BOOK_KEEPING = frozenset(vars(nn.Module())) | {"forward", "_replicate_for_data_parallel"}


class Watch:
    """The members of one region and the plain attributes that their forwards may read.

    Attributes in which the region differs from its siblings are left out: one graph serves them all only when it
    has read none of them.
    """

    def __init__(self, module: nn.Module, path: str, structure: Structure) -> None:
        self.root = module if not path else None
        self.members = members(module, path, structure)
        group = structure.blocks.get(path)
        hidden = structure.differing.get(group, set()) if group is not None else set()
        below = {id(inner): name for name, inner in module.named_modules()}
        self.plain: list[tuple[dict[str, Any], str]] = []
        self.tensors: list[tuple[dict[str, Any], str]] = []
        for member in self.members:
            for name, value in vars(member).items():
                if name in BOOK_KEEPING or (below.get(id(member), ""), name) in hidden:
                    continue
                if isinstance(value, PRIMITIVES):
                    self.plain.append((vars(member), name))
                elif isinstance(value, torch.Tensor):
                    self.tensors.append((vars(member), name))

    def state(self) -> Hashable:
        """Equal for two calls that one graph may serve."""
        plain = tuple([table.get(name) for table, name in self.plain])
        tensors = tuple([id(table.get(name)) for table, name in self.tensors])
        options = settings(self.root) if self.root is not None else None
        return (flags(self.members), plain, tensors, options)


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
