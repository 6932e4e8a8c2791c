"""Tensors that are computed when they are read."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from rewrite import DeferredError
from rewrite.deferred import Deferred, defer, dropped


def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows @ weight.t()


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(3, 4, generator=generator, requires_grad=True),
        torch.randn(5, 4, generator=generator, requires_grad=True),
    )


def made(rows: torch.Tensor, weight: torch.Tensor) -> Deferred:
    value = defer(product, (rows, weight), (3, 5), torch.float32, name="logits")
    assert isinstance(value, Deferred)
    return value


def is_computed(value: torch.Tensor) -> bool:
    assert isinstance(value, Deferred)
    return value.content.value is not None


def test_looking_at_it_computes_nothing() -> None:
    value = made(*operands())
    assert (value.shape, value.dtype, value.device, value.dim(), len(value)) == (
        (3, 5),
        torch.float32,
        torch.device("cpu"),
        2,
        3,
    )
    assert value.requires_grad
    assert value.grad_fn is not None
    assert repr(value) == "deferred(shape=(3, 5), dtype=torch.float32, device=cpu)"
    assert value.untyped_storage().nbytes() == 0
    assert not is_computed(value)


@pytest.mark.parametrize(
    "read",
    [
        lambda value: value + 1,
        lambda value: value.softmax(-1),
        lambda value: value[:, -1],
        lambda value: value.argmax(-1),
        lambda value: torch.cat([value, value]),
        lambda value: value.half(),
        lambda value: torch.nn.functional.cross_entropy(value, torch.tensor([0, 1, 2])),
        lambda value: torch.tensor(value.tolist()),
        lambda value: torch.from_numpy(value.detach().numpy().copy()),
        lambda value: torch.from_numpy(value.numpy(force=True).copy()),
        lambda value: torch.tensor(list(map(list, value.detach().numpy()))),
        lambda value: copy.deepcopy(value.detach()),
        lambda value: pickle.loads(pickle.dumps(value.detach())),
        lambda value: torch.stack(list(value)),
        lambda value: value.clone() + 0,
        lambda value: value.detach() * 2,
        lambda value: value.double().sum(),
    ],
)
def test_reading_it_gives_what_an_ordinary_tensor_gives(read: object) -> None:
    rows, weight = operands()
    found = read(made(rows, weight))  # type: ignore[operator]
    assert type(found) is torch.Tensor or isinstance(found, Deferred)
    assert torch.equal(found, read(product(rows, weight)))  # type: ignore[operator]


def test_gradients_flow_through_it() -> None:
    rows, weight = operands()
    made(rows, weight).softmax(-1)[:, 0].sum().backward()
    found = rows.grad, weight.grad
    rows.grad = weight.grad = None
    product(rows, weight).softmax(-1)[:, 0].sum().backward()
    assert torch.equal(found[0], rows.grad)  # type: ignore[arg-type]
    assert torch.equal(found[1], weight.grad)  # type: ignore[arg-type]


def test_it_is_computed_once_and_copies_stay_deferred() -> None:
    calls: list[int] = []
    rows, weight = operands()
    value = defer(lambda a, b: calls.append(1) or product(a, b), (rows, weight), (3, 5), torch.float32, name="x")  # type: ignore[func-returns-value]
    copies = [value.detach(), value.clone(), value.to(torch.float64), value.detach().clone()]
    assert not any(map(is_computed, copies))
    assert copies[2].dtype == torch.float64
    for each in (value, *copies):
        assert torch.allclose(each.double(), product(rows, weight).double())
    assert len(calls) == 1


def test_writing_to_it_leaves_copies_as_they_were() -> None:
    rows, weight = operands()
    with torch.no_grad():
        value = made(rows, weight)
        same, apart = value.detach(), value.clone()
        value.add_(1)
        assert torch.equal(value, product(rows, weight) + 1)
        assert torch.equal(same, value)
        assert torch.equal(apart, product(rows, weight))
        value[:, 0] = 7
        assert bool((value[:, 0] == 7).all())


def test_a_weight_changed_since_is_an_error() -> None:
    rows, weight = operands()
    value = made(rows, weight)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(DeferredError) as caught:
        value.sum()
    assert str(caught.value) == (
        "reading logits: they are computed when they are read, and what they are computed from, such as a weight, has "
        "been changed in place since\n"
        "Next: read them before the backward and the optimizer's step, or have them kept with logits=keep"
    )


def test_a_weight_released_since_is_an_error() -> None:
    rows, weight = operands()
    value = made(rows, weight)
    weight.untyped_storage().resize_(0)
    with pytest.raises(DeferredError, match="has been released since"):
        value.sum()


def test_dropped_values_cannot_be_read() -> None:
    value = dropped((2, 3), torch.float32, torch.device("cpu"), name="logits", next_step="ask for them")
    assert value.shape == (2, 3)
    assert value.detach().is_dropped  # type: ignore[attr-defined]
    with pytest.raises(DeferredError, match="logits: it was dropped"):
        value.sum()


def test_on_fakes() -> None:
    with FakeTensorMode():
        rows, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
        value = made(rows, weight)
        assert value.exp().shape == (3, 5)
        value.sum().backward()
        assert weight.grad is not None


def test_autocast_of_the_forward_holds_when_it_is_read() -> None:
    rows, weight = operands()
    with torch.autocast("cpu", torch.bfloat16):
        value = defer(product, (rows, weight), (3, 5), torch.bfloat16, name="logits")
        expected = product(rows, weight)
    assert torch.equal(value + 0, expected)
