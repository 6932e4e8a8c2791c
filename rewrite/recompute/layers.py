"""Where the state of some modules lies, found once: to walk modules takes longer than to look at what they hold."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from rewrite.recompute.plan import Plan

BOOK_KEEPING = frozenset(vars(nn.Module())) - {"training"}
"""What torch keeps in every module, beside the mode."""

Owners = Callable[[nn.Module], tuple[nn.Module, ...]]
"""The modules below a region's own whose parameters a segment reads."""

Rows = tuple[tuple[dict[str, Any], ...], tuple[str, ...]]
"""Tables, and of each a name in it."""


@functools.cache
def owners_at(paths: tuple[str, ...]) -> Owners:
    """A function from a module to those at `paths` below it; "" for itself."""
    # Through the tables: the attribute lookup of modules is Python's.
    found = [f"module{''.join(f'._modules[{name!r}]' for name in path.split('.') if name)}" for path in paths]
    owners: Owners = eval(f"lambda module: ({''.join(f'{each}, ' for each in found)})", {})
    return owners


class Layers:
    """The modules whose parameters a segment reads, all below them, and the tables that hold their state."""

    __slots__ = (
        "absent", "all", "children", "counted", "find", "homes", "lasting", "lengths", "options", "own", "owners",
        "tables", "tensors",
    )  # fmt: skip

    def __init__(self, find: Owners, module: nn.Module) -> None:
        """Those that `find` finds in `module`."""
        self.find, self.owners = find, find(module)
        layers = self.all = modules_of(self.owners)
        held = [(table, name, tensor) for table in tables_of(layers) for name, tensor in table.items()]
        self.tensors = _rows([(table, name) for table, name, tensor in held if tensor is not None])
        """Of parameters and buffers."""
        self.absent = _rows([(table, name) for table, name, tensor in held if tensor is None])
        self.own = [*map(vars, layers)]
        self.options = _rows([(table, name) for table in self.own for name in table if name not in BOOK_KEEPING])
        """Of attributes."""
        self.children = [(layer._modules, [*layer._modules.items()]) for layer in layers if layer._modules]
        self.homes = _rows([(table, name) for table in self.own for name in ("_parameters", "_buffers", "_modules")])
        self.tables: list[Any] = [*map(dict.get, *self.homes)]
        self.lasting = all(isinstance(table, dict) for table in self.tables)
        """Whether modules hold the tables themselves: those of a scripted one lie in C++."""
        self.counted = [*self.own, *self.tables] if self.lasting else []
        self.lengths = [*map(len, self.counted)]

    def serve(self, module: nn.Module) -> bool:
        """Whether the state still lies where it lay."""
        return (
            self.are_in(module)
            and all(map(operator.is_, map(vars, self.all), self.own))
            and all(map(operator.is_, map(dict.get, *self.homes), self.tables))
            and [*map(len, self.counted)] == self.lengths
            and all(map(operator.is_, map(dict.get, *self.absent), repeat(None)))
        )

    def are_in(self, module: nn.Module) -> bool:
        """Whether these very modules are in `module`, and none was put in the place of another."""
        return self.find(module) == self.owners and all([*table.items()] == then for table, then in self.children)


def layers_of(plan: Plan, module: nn.Module) -> Layers:
    """Those whose parameters `plan` reads at `module`, remembered by the code that stands as the module's forward."""
    known = getattr(vars(module).get("forward"), "layers_by_plan", None)
    if known is None:
        return Layers(plan.owners, module)
    found: Layers | None = known.get(plan)
    if found is None or not found.serve(module):
        found = Layers(plan.owners, module)
        if found.lasting:
            known[plan] = found
    return found


def modules_of(owners: tuple[nn.Module, ...]) -> list[nn.Module]:
    """The owners, and all below them."""
    return [each for owner in owners for each in (owner.modules() if owner._modules else (owner,))]


def tables_of(modules: Sequence[nn.Module]) -> list[dict[str, torch.Tensor | None]]:
    """Their parameters and buffers, as they hold them; of scripted ones a copy."""
    tables: list[Mapping[str, torch.Tensor | None]] = [
        table for each in modules for table in (each._parameters, each._buffers) if table
    ]
    return [table if isinstance(table, dict) else dict(table.items()) for table in tables]


def _rows(found: list[tuple[dict[str, Any], str]]) -> Rows:
    return tuple(zip(*found, strict=True)) if found else ((), ())
