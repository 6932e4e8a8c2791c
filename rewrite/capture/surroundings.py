"""State outside the arguments of a call: grad mode, autocast, random numbers, and what a forward leaves behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import sys
from collections.abc import Hashable, Iterator
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import nn


def surroundings() -> Hashable:
    """Global settings that a graph does not carry, and autocast, whose spans it does."""
    casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return (casts, attention(), torch.is_inference_mode_enabled(), torch.get_default_dtype())


def attention() -> tuple[bool, bool, bool]:
    """Which kinds of attention kernels are allowed: as `torch.backends.cuda.flash_sdp_enabled` and its like say."""
    c = torch._C
    return (c._get_flash_sdp_enabled(), c._get_mem_efficient_sdp_enabled(), c._get_math_sdp_enabled())


def ambient() -> Hashable:
    """State outside the arguments that decides what torch computes: grad mode, autocast, the default dtype."""
    devices = ("cpu", "cuda")
    casts = tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in devices)
    modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    return (modes, casts, torch.get_default_dtype(), attention())


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Python's, numpy's and torch's random numbers go on as if nothing had run."""
    python, numbers = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)


class Kept:
    """The content of an object's `__dict__`, and of the dicts in it (parameters, buffers, hooks), to put back.

    A forward may settle options in a config, or install hooks; a capture leaves no trace of it.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.tables = [attributes, *(value for value in attributes.values() if isinstance(value, dict))]
        self.contents = [dict(table) for table in self.tables]

    def restore(self) -> None:
        for table, content in zip(self.tables, self.contents, strict=True):
            if table.keys() != content.keys() or any(table[name] is not content[name] for name in content):
                table.clear()
                table.update(content)


def configs(root: nn.Module) -> list[Any]:
    """The configuration objects of the tree's modules, each once."""
    found = {
        id(config): config for module in root.modules() if hasattr(config := vars(module).get("config"), "__dict__")
    }
    return list(found.values())


@contextlib.contextmanager
def caches_kept() -> Iterator[None]:
    """Empty the user's `functools.lru_cache`s that grew within the block: they would hand out its fakes later."""
    sizes = {id(cache): cache.cache_info().currsize for cache in _caches()}
    try:
        yield
    finally:
        for cache in _caches():
            if cache.cache_info().currsize > sizes.get(id(cache), 0):
                cache.cache_clear()


def _caches() -> list[Any]:
    kind: Any = type(functools.lru_cache(_caches))
    tracked = gc.get_referrers(kind)  # every object refers to its type; half the time of going through all objects
    frozen = _globals() if gc.get_freeze_count() else []
    found = {id(value): value for value in (*tracked, *frozen) if type(value) is kind}
    return [cache for cache in found.values() if not _of_a_library(cache)]


def _globals() -> list[Any]:
    """What the users' modules define, and their classes: after a `gc.freeze()` the collector no longer lists it."""
    modules = [vars(module) for module in list(sys.modules.values()) if not _of_a_library(module)]
    values = [value for module in modules for value in list(module.values())]
    return [*values, *(value for kind in values if isinstance(kind, type) for value in list(vars(kind).values()))]


def _of_a_library(value: Any) -> bool:
    """Whether a module, or a function by its module, belongs to a library whose caches hold no tensors."""
    name = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
    return str(name or "").split(".")[0] in LIBRARIES


LIBRARIES = ("torch", "sympy", "mpmath", "numpy", "typing", "re", "inspect", "functools", "rewrite", "transformers")
"""Whose caches hold no tensors."""


def same_numpy_state(one: Any, other: Any) -> bool:
    """Whether numpy's generator stands where it stood, from two answers of `numpy.random.get_state()`."""
    return bool(one[2] == other[2] and numpy.array_equal(one[1], other[1]))
