"""The private torch names that `rewrite.memory` stands on, one test each: what breaks on the next torch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rewrite.memory.autograd import (
    Holders,
    holders,
    lone_holders,
    newest_sequence_number,
    routes_twice,
    running_sequence_number,
)

aten = torch.ops.aten


class Watch(TorchDispatchMode):
    """Notes what a function answers whenever an operator runs."""

    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.ask = ask
        self.seen: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, self.ask(args)))
        return func(*args, **(kwargs or {}))


def test_sequence_numbers_tie_backward_to_forward() -> None:
    x = torch.ones(3, requires_grad=True)
    with Watch(lambda _: newest_sequence_number()) as forward:
        y = torch.tanh(x)
    with Watch(lambda _: running_sequence_number()) as backward:
        y.sum().backward()

    (made,) = [number for func, number in forward.seen if func is aten.tanh.default]
    (ran,) = [number for func, number in backward.seen if func is aten.tanh_backward.default]
    assert made == ran


def test_no_sequence_number_outside_a_backward_nor_for_accumulation() -> None:
    x = torch.ones(3, requires_grad=True)
    with Watch(lambda _: running_sequence_number()) as watch:
        (x * 2).sum().backward()

    assert dict(watch.seen)[aten.mul.Tensor] is not None
    assert watch.seen[-1] == (aten.detach.default, None)
    assert running_sequence_number() is None


def test_holders_tell_a_lone_gradient_from_a_shared_one() -> None:
    x = torch.ones(3, requires_grad=True)

    def additions(loss: torch.Tensor) -> list[Holders]:
        with Watch(lambda args: holders(args[0]) if args and isinstance(args[0], torch.Tensor) else None) as watch:
            loss.backward()
        return [counts for func, counts in watch.seen if func is aten.add.Tensor]

    twice = x * 2
    assert additions(((twice * 3).exp() + (twice * 4).exp()).sum()) == [lone_holders()]
    twice = x * 2
    assert additions((twice + (twice * 3).exp() + twice).sum())[0] != lone_holders()


def test_routes_twice_sees_a_square() -> None:
    x = torch.ones(3, requires_grad=True)

    def in_multiplication(loss: torch.Tensor) -> bool:
        with Watch(lambda _: running_sequence_number() is not None and routes_twice()) as watch:
            loss.backward()
        return next(answer for func, answer in watch.seen if func is aten.mul.Tensor)

    assert in_multiplication((x * x).sum())
    assert not in_multiplication((x * 2).sum())


def test_a_storage_keeps_its_python_object_and_tells_when_it_dies() -> None:
    import weakref

    x = torch.ones(3)
    view = x.view(1, 3)
    died = []
    reference = weakref.ref(view.untyped_storage(), died.append)

    assert reference() is x.untyped_storage()
    assert x.untyped_storage()._cdata == view.untyped_storage()._cdata
    del x
    assert not died
    del view
    assert len(died) == 1


def test_fakes_tell_their_device_without_a_dispatch() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert torch.empty(2).fake_device == torch.device("cpu")


def test_a_dispatch_mode_can_leave_the_compiler_out() -> None:
    assert callable(TorchDispatchMode._should_skip_dynamo)


def test_the_flop_registry_has_the_matrix_operators() -> None:
    from torch.utils.flop_counter import flop_registry

    assert {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution} <= set(flop_registry)
