"""What a layer that runs by its own code is set to, as text that is the same in every process."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from torch import nn

_NO_SETTINGS = frozenset(vars(nn.Module())) | {"train"}
"""Attributes that every module has (its tables, its hooks, its mode), and what holds its mode."""


def settings(layer: nn.Module) -> Iterator[str]:
    """A line for each module at and below `layer`: its class and its plain attributes.

    What a module prints as leaves out much of it: the heads of an attention, the order of its norms.
    """
    for path, module in layer.named_modules():
        kind = type(module)
        held = {name: _text(value) for name, value in vars(module).items() if name not in _NO_SETTINGS}
        yield f"{path} {kind.__module__}.{kind.__qualname__} {module.extra_repr()} {sorted(held.items())}"


def _text(value: Any) -> str:
    """A value's text. Of what prints its address, the address too: such a layer's examples last for one process."""
    if isinstance(value, types.FunctionType) and value.__closure__ is None:
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
