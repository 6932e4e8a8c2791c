"""What a rewritten model recomputes, and what it still holds: a case says nothing when nothing is recomputed."""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rewrite
from rewrite import RECOMPUTE

SPECS = ("checkpoint", "checkpoint{policy=sqrt}")


def planned_between(model: nn.Module, inputs: Any) -> str:
    """A pipeline that plans what each block keeps, for a budget nearer to full recompute than to the step as it is."""
    highest = rewrite.estimate(model, inputs).peak_bytes
    lowest = rewrite.estimate(rewrite.optimize(model, "checkpoint", example_inputs=inputs), inputs).peak_bytes
    assert lowest < highest
    return f"checkpoint{{budget={(highest + 9 * lowest) // 10}}}"


def recomputed(model: nn.Module) -> set[str]:
    """Paths of the modules whose operations, some of them at least, are in a recompute segment."""
    program = rewrite.report(model).after
    assert program is not None
    tagged = [(region, node) for region in program.regions for node in region.nodes() if RECOMPUTE in node.meta]
    found = {path for region, _ in tagged for path in region.instances}
    return found | {f"{region.path}.{node.target}".lstrip(".") for region, node in tagged if node.op == "call_module"}


def assert_recomputed(model: nn.Module, *patterns: str) -> None:
    """Each glob selects a module that is recomputed."""
    found = recomputed(model)
    missing = [pattern for pattern in patterns if not fnmatch.filter(found, pattern)]
    assert not missing, f"{missing} are not among {sorted(found)}"


class _Made(TorchDispatchMode):
    """Follows every storage that an operator makes, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.storages.append((StorageWeakRef(storage), storage.nbytes()))
        return out


def saved_bytes(model: nn.Module, hidden: torch.Tensor) -> int:
    """Bytes of the real storages that a forward makes and that live on until its backward, the loss excluded."""
    with _Made() as made:
        loss = model(hidden)
    others = {tensor.untyped_storage()._cdata for tensor in (hidden, loss, *model.parameters(), *model.buffers())}
    alive = {ref.cdata: size for ref, size in made.storages if not ref.expired()}
    return sum(size for storage, size in alive.items() if storage not in others)
