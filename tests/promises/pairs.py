"""A fresh model and the rewrite of an equal one, each with weights of its own."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

import pytest
from torch import nn

import rewrite
from passes import Checkpoint
from tests.zoo import ZOO
from tests.zoo.entry import Inputs

POLICIES = ("blocks", "sqrt")
policies = pytest.mark.parametrize("policy", POLICIES)


@dataclass(frozen=True)
class Pair:
    """A model as its author wrote it, and a rewritten one with equal weights."""

    plain: nn.Module
    small: nn.Module
    inputs: Inputs


def names(*quick: str, sweep: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Run a test for each model of `quick`, and for those of `sweep` when asked for."""
    return pytest.mark.parametrize("name", [*quick, *(pytest.param(name, marks=pytest.mark.sweep) for name in sweep)])


def pair(name: str, policy: str = "blocks", *, fresh: bool = False) -> Pair:
    """Both in train mode, with a batch of the first shape.

    The rewritten one is a deep copy of a model rewritten once, which saves most of the time; `fresh` rewrites anew.
    """
    entry = ZOO[name]
    small = _rewritten.__wrapped__(name, policy) if fresh else copy.deepcopy(_rewritten(name, policy))
    return Pair(entry.build(), small, entry.inputs(*entry.shapes[0], entry.masks[0]))


@functools.lru_cache
def _rewritten(name: str, policy: str) -> nn.Module:
    entry = ZOO[name]
    inputs = entry.inputs(*entry.shapes[0], entry.masks[0])
    return rewrite.optimize(entry.build(), passes=[Checkpoint(policy=policy)], example_inputs=inputs)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of the first list of repeated blocks."""
    return next(
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(item) for item in module}) == 1
    )
