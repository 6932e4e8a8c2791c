"""What a snapshot of modules notices, and what it holds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rewrite.capture.snapshot import Snapshot


class Options:
    def __init__(self) -> None:
        self.scale, self.sizes = 1.0, [1, [2, 3]]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.options, self.table = Options(), {"a": (1, 2)}
        self.scale: Any = 0.5
        self.cache: torch.Tensor | None = torch.zeros(3)


def taken(layer: Layer, below: nn.Module) -> Snapshot:
    ignored = frozenset(vars(nn.Module())) - {"training"}
    return Snapshot([layer, layer.inner], [below], ignored, [layer.table, vars(layer.options)])


CHANGES: dict[str, Callable[[Layer, nn.Module], Any]] = {
    "training": lambda layer, below: layer.eval(),
    "attribute": lambda layer, below: setattr(layer, "scale", 0.25),
    "new attribute": lambda layer, below: setattr(layer, "other", 1),
    "attribute gone": lambda layer, below: delattr(layer, "scale"),
    "tensor": lambda layer, below: setattr(layer, "cache", torch.zeros(3)),
    "tensor gone": lambda layer, below: setattr(layer, "cache", None),
    "content of a dict": lambda layer, below: layer.table.update(a=(1, 3)),
    "option": lambda layer, below: setattr(layer.options, "scale", 2.0),
    "nested list": lambda layer, below: layer.options.sizes[1].append(4),  # type: ignore[attr-defined, union-attr]
    "option of a layer": lambda layer, below: setattr(layer.inner, "in_features", 4),
    "layer": lambda layer, below: setattr(layer, "inner", nn.Linear(3, 3)),
    "frozen": lambda layer, below: layer.inner.weight.requires_grad_(False),
    "dtype": lambda layer, below: layer.inner.double(),
    "parameter gone": lambda layer, below: layer.inner.register_parameter("bias", None),
    "hook": lambda layer, below: layer.inner.register_forward_hook(lambda *_: None),
    "hook below": lambda layer, below: below.register_full_backward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: str) -> None:
    layer, below = Layer(), nn.Linear(2, 2)
    snapshot = taken(layer, below)
    assert snapshot.holds()
    CHANGES[change](layer, below)
    assert not snapshot.holds()


def test_weights_that_move_change_nothing() -> None:
    layer, below = Layer(), nn.Linear(2, 2)
    snapshot = taken(layer, below)
    with torch.no_grad():
        layer.inner.weight.add_(1)
    layer.inner.load_state_dict(nn.Linear(3, 3).state_dict())
    assert snapshot.holds()


def test_with_hooks_there_is_nothing_to_hold_on_to() -> None:
    layer, below = Layer(), nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda *_: None)
    assert not taken(layer, below).holds()


def test_tensors_and_weights_are_not_kept_alive() -> None:
    layer, below = Layer(), nn.Linear(2, 2)
    snapshot = taken(layer, below)
    assert layer.cache is not None
    gone = [weakref.ref(layer.cache), weakref.ref(layer.inner.weight)]
    layer.cache, layer.inner.weight = None, nn.Parameter(torch.zeros(3, 3))
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert not snapshot.holds()
