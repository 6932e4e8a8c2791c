"""A plan is used again for an equal call, and made anew where a layer has a hook since."""

from __future__ import annotations

import torch
from torch import nn

import rewrite
from rewrite.plan.settled import call_key
from tests.plan.models import Bridged


def key(model: nn.Module, hidden: torch.Tensor) -> object:
    return call_key(rewrite.capture(model, hidden), (hidden,), {})


def test_equal_calls_have_one_key_and_another_size_or_graph_another() -> None:
    model = Bridged()

    assert key(model, torch.randn(4, 48)) == key(model, torch.randn(4, 48))
    assert key(model, torch.randn(4, 48)) != key(model, torch.randn(8, 48))
    assert key(model, torch.randn(4, 48)) != key(Bridged(depth=9), torch.randn(4, 48))


def test_what_a_class_is_called_is_no_part_of_a_call() -> None:
    renamed = Bridged()
    renamed.__class__ = type("FSDPBridged", (Bridged,), {})

    assert key(renamed, torch.randn(4, 48)) == key(Bridged(), torch.randn(4, 48))


def test_a_hook_on_a_layer_is() -> None:
    hooked = Bridged()
    hooked.inside[2].register_forward_hook(lambda *_: None)

    assert key(hooked, torch.randn(4, 48)) != key(Bridged(), torch.randn(4, 48))
