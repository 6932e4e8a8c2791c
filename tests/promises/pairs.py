"""A fresh model and the rewrite of an equal one, each with weights of its own."""

from __future__ import annotations

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


def pair(name: str, policy: str = "blocks", *, mask: int = 0) -> Pair:
    """Both in train mode, with a batch of the first shape."""
    entry = ZOO[name]
    inputs = entry.inputs(*entry.shapes[0], entry.masks[mask])
    small = rewrite.optimize(entry.build(), passes=[Checkpoint(policy=policy)], example_inputs=inputs)
    return Pair(entry.build(), small, inputs)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The elements of the first list of repeated blocks."""
    return next(
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(item) for item in module}) == 1
    )
