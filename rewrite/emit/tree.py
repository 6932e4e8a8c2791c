"""A structural copy of a module tree: modules of its own, the same parameters, buffers and everything else."""

from __future__ import annotations

import types
from collections import OrderedDict
from typing import Any

import torch
from torch import nn


def copy_tree(root: nn.Module) -> nn.Module:
    """Modules anew, with the same classes and attributes; every Parameter, buffer and plain value is shared.

    References from one module of the tree to another, also in lists, dicts and bound methods, lead to the copy.
    """
    copies: dict[int, nn.Module] = {}
    for module in root.modules():
        scripted = isinstance(module, torch.jit.ScriptModule)  # its state lives in C++: shared as it is
        copies[id(module)] = module if scripted else object.__new__(type(module))
    for module in root.modules():
        made = copies[id(module)]
        if made is module:
            continue
        for name, value in vars(module).items():
            vars(made)[name] = _copied(value, copies, top=True)
    return copies[id(root)]


def _copied(value: Any, copies: dict[int, nn.Module], *, top: bool = False) -> Any:
    """`value` with each module of the tree replaced by its copy; containers directly below a module are copied."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, types.MethodType):
        owner = copies.get(id(value.__self__))
        return value if owner is None else types.MethodType(value.__func__, owner)
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind((key, _copied(item, copies)) for key, item in value.items())
    if kind in (list, tuple, set, frozenset):
        return kind(_copied(item, copies) for item in value)
    return value
