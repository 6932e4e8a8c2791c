"""Where the state of some modules lies, found once: to walk modules takes longer than to look at what they hold."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from rewrite.recompute.plan import Plan

BOOK_KEEPING = frozenset(vars(nn.Module())) - {"training"}
"""What torch keeps in every module, beside the mode."""

Rows = tuple[tuple[dict[str, Any], ...], tuple[str, ...]]
"""Tables, and of each a name in it."""


class Layers:
    """The modules whose parameters a segment reads, all below them, and the tables that hold their state."""

    __slots__ = ("absent", "children", "counted", "lasting", "lengths", "options", "owners", "tensors")

    def __init__(self, owners: tuple[nn.Module, ...]) -> None:
        self.owners = owners
        layers = modules_of(owners)
        held = [(table, name, tensor) for table in tables_of(layers) for name, tensor in table.items()]
        self.tensors = _rows([(table, name) for table, name, tensor in held if tensor is not None])
        """Of parameters and buffers."""
        self.absent = _rows([(table, name) for table, name, tensor in held if tensor is None])
        own = [vars(layer) for layer in layers]
        self.options = _rows([(table, name) for table in own for name in table if name not in BOOK_KEEPING])
        """Of attributes."""
        self.children = [(layer._modules, [*layer._modules.items()]) for layer in layers if layer._modules]
        tables = [table for layer in layers for table in (layer._parameters, layer._buffers, layer._modules)]
        self.lasting = all(isinstance(table, dict) for table in tables)
        """Whether the tables are the modules' own: those of a scripted one lie in C++."""
        self.counted = [*own, *tables]
        self.lengths = [*map(len, self.counted)]

    def serve(self, owners: tuple[nn.Module, ...]) -> bool:
        """Whether the state of `owners` still lies where it lay."""
        return (
            owners == self.owners
            and [*map(len, self.counted)] == self.lengths
            and all(map(operator.is_, map(dict.get, *self.absent), repeat(None)))
            and all([*table.items()] == then for table, then in self.children)
        )


def layers_of(plan: Plan, module: nn.Module) -> Layers:
    """Those whose parameters `plan` reads at `module`, remembered by the code that stands as the module's forward."""
    owners = plan.owners(module)
    known = getattr(vars(module).get("forward"), "layers_by_plan", None)
    if known is None:
        return Layers(owners)
    found: Layers | None = known.get(plan)
    if found is None or not found.serve(owners):
        found = Layers(owners)
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
