"""Fit what a call of a block hands over to the region that serves it, and what a piece gives to a run of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rewrite.plan.stage import example
from rewrite.program import Region, value_tensors


class Held:
    """Stands for an object that holds tensors, such as a key-value cache."""


def takes(region: Region, given: list[Any]) -> bool:
    """Whether a region's placeholders are like what a call hands over: sizes, dtypes, what gradients flow through."""
    described = [example(node.meta.get("val")) for node in region.graph.nodes if node.op == "placeholder"]
    if len(described) != len(given):
        return False
    pairs = [
        (one, other)
        for one, other in zip(described, given, strict=True)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    ]
    return all(
        (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)
        for one, other in pairs
    )


def aligned(region: Region, leaves: list[Any]) -> list[Any]:
    """The leaves of a call for the region's placeholders. An object's content is taken as capture described it."""
    placeholders = [node for node in region.graph.nodes if node.op == "placeholder"]
    if len(leaves) == len(placeholders):
        return leaves
    described = [example(node.meta.get("val")) for node in placeholders]
    before = next((place for place, leaf in enumerate(leaves) if isinstance(leaf, Held)), len(leaves))
    after = len(leaves) - before - 1
    if sum(isinstance(leaf, Held) for leaf in leaves) != 1 or before + after > len(described):
        return [*leaves[:before], *described[before:]]
    middle = described[before : len(described) - after]
    return [*leaves[:before], *middle, *leaves[len(leaves) - after :]]


def anew(inputs_then: Sequence[Any], results_then: tuple[Any, ...], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """What a piece returns for `inputs`: tensors without history, sharing storages as in a run before."""
    bases: dict[int, torch.Tensor] = {}
    for first, given in zip(inputs_then, inputs, strict=True):
        for known, tensor in zip(value_tensors(first), value_tensors(given), strict=True):
            bases.setdefault(known.untyped_storage()._cdata, tensor.detach())

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        base = bases.get(storage._cdata)
        if base is None:
            base = bases[storage._cdata] = torch.empty(storage.nbytes() // value.itemsize, dtype=value.dtype)
        if base.dtype != value.dtype:
            base = torch.empty(storage.nbytes() // value.itemsize, dtype=value.dtype)
        made = base.as_strided(value.shape, value.stride(), value.storage_offset())
        return made.requires_grad_() if value.requires_grad else made

    results: tuple[Any, ...] = torch.utils._pytree.tree_map(leaf, results_then)
    return results
