"""Copies of weights are made once, and are never out of date."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rewrite import weight_casts
from rewrite.weight_casts import cast_weight, copies, next_round, projections


class Casts(TorchDispatchMode):
    """Counts casts to half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.float16:
            self.count += 1
        return out


def swap(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() + 1)


def set_data(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.detach() + 1


WRITES: dict[str, Callable[[nn.Linear], object]] = {
    "an optimizer's step": lambda layer: torch.optim.SGD([layer.weight], lr=0.1).step(),
    "an update in place": lambda layer: torch.no_grad()(layer.weight.add_)(1.0),
    "load_state_dict": lambda layer: layer.load_state_dict({"weight": layer.weight.detach() + 1}),
    "a write through .data": lambda layer: layer.weight.data.add_(1.0),
    "a negation through .data": lambda layer: layer.weight.data.neg_(),
    "rows changed for one another through .data": lambda layer: layer.weight.data.copy_(layer.weight.flip(0)),
    "one element through .data": lambda layer: layer.weight.data[3, 2].fill_(7.0),
    "another .data": set_data,
    "another parameter": swap,
}


@pytest.mark.parametrize("write", WRITES)
def test_a_copy_is_never_out_of_date(write: str) -> None:
    layer = nn.Linear(16, 8, bias=False)
    layer.weight.grad = torch.ones(8, 16)
    for _ in range(3):
        next_round()
        cast_weight(layer.weight, torch.float16)
        WRITES[write](layer)
        next_round()
        assert torch.equal(cast_weight(layer.weight, torch.float16), layer.weight.half())


def test_one_cast_for_many_uses_until_a_write() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    with Casts() as counted:
        for _ in range(3):
            next_round()
            for _ in range(2):
                cast_weight(weight, torch.float16)
    assert counted.count == 1


def test_a_frozen_weight_is_cast_once_for_good() -> None:
    frozen, trained = nn.Parameter(torch.randn(4, 4), requires_grad=False), nn.Parameter(torch.randn(4, 4))
    optimizer = torch.optim.SGD([trained], lr=0.1)
    with Casts() as counted:
        for _ in range(3):
            next_round()
            (cast_weight(frozen, torch.float16) @ cast_weight(trained, torch.float16)).float().sum().backward()
            optimizer.step()
    assert counted.count == 1 + 3 + 3  # frozen, trained, and the gradient of the product in each backward


def test_gradients_reach_the_weight_in_its_own_precision() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    cast_weight(weight, torch.float16).float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, torch.ones(4, 4))


def test_a_copy_goes_with_its_weight() -> None:
    gc.collect()
    before = len(list(copies()))
    weight = nn.Parameter(torch.randn(4, 4))
    cast_weight(weight, torch.float16)
    assert len(list(copies())) == before + 1
    del weight
    gc.collect()
    assert len(list(copies())) == before


def test_made_under_inference_mode_it_serves_training() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    with torch.inference_mode():
        cast_weight(weight, torch.float16)
    (cast_weight(weight, torch.float16) * torch.ones(4, 4, requires_grad=True)).sum().backward()
    assert weight.grad is not None


def test_a_weight_whose_storage_was_emptied_is_not_copied_again() -> None:
    """As a sharding engine does between two uses: a copy would hold what it gave back."""
    weight = nn.Parameter(torch.randn(4, 4))
    other = nn.Parameter(torch.randn(4, 4))
    cast_weight(other, torch.float16)
    cast_weight(weight, torch.float16)
    size = weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)
    next_round()
    cast_weight(other, torch.float16)
    held = len(list(copies()))
    weight.untyped_storage().resize_(size)
    with torch.no_grad():
        weight.fill_(2.0)
    assert torch.equal(cast_weight(weight, torch.float16), weight.half())
    assert len(list(copies())) == held


def test_a_tensor_with_a_history_is_cast_as_it_is() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    doubled = weight * 2
    before = len(weight_casts._copies)
    cast_weight(doubled, torch.float16).float().sum().backward()
    assert len(weight_casts._copies) == before
    assert weight.grad is not None


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.complex64, torch.bool]
)
@pytest.mark.parametrize("shape", [(5,), (1,), (), (3, 4), (2, 3, 4)])
def test_a_projection_sees_a_write_to_any_element(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.zeros(shape, dtype=dtype)
    seen = {projections([weight])}
    for place in range(weight.numel()):
        weight.data.zero_()
        weight.data.view(-1)[place] = 1
        seen.add(projections([weight]))
    assert len(seen) == weight.numel() + 1


def test_projections_of_many_come_in_their_order() -> None:
    weights = [torch.ones(3), torch.empty(0), torch.ones(2, 2), torch.ones(3)]
    found = projections(weights)
    assert found == tuple(projections([each])[0] for each in weights)
    assert found[0] == found[3] != found[2]
    assert found[1] == 0.0
