"""Questions about data on fake tensors are answered from shadows, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rewrite.capture.answers import Answers
from rewrite.capture.outside import outside_modes, size_hint

MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


class FunctionLevel(TorchFunctionMode):
    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ask(self.answers, func, args, kwargs or {})


class DispatchLevel(TorchDispatchMode):
    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers = answers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ask(self.answers, func, args, kwargs or {})


def ask(answers: Answers, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    known = answers.answer(func, args, kwargs)
    if known is not NotImplemented:
        return known
    out = func(*args, **kwargs)
    answers.follow(func, args, kwargs, out)
    return out


@pytest.fixture(params=[FunctionLevel, DispatchLevel])
def mask(request: pytest.FixtureRequest) -> Iterator[torch.Tensor]:
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    fake = fakes.from_tensor(MASK)
    with fakes, request.param(Answers({id(fake): MASK})):
        yield fake


def test_answers_what_follows_from_the_inputs(mask: torch.Tensor) -> None:
    assert not bool(mask.bool().all())
    assert mask.sum(-1).tolist() == [2, 3]
    assert ((torch.arange(3)[None].expand(2, 3) * mask) == 2).any().item()
    assert torch.equal(mask, mask)


def test_follows_writes_through_views(mask: torch.Tensor) -> None:
    made = torch.zeros_like(mask)
    made[:, 1] = 5

    assert made.tolist() == [[0, 5, 0], [0, 5, 0]]


def test_a_write_of_unknown_data_forgets_the_value_and_its_views(mask: torch.Tensor) -> None:
    made = torch.zeros_like(mask)
    row = made[0]
    row.copy_(torch.randint(0, 3, (3,)))

    with pytest.raises(DataDependentOutputException):
        made.sum().item()


def test_random_numbers_have_no_answer_and_leave_the_generator_alone(mask: torch.Tensor) -> None:
    before = torch.get_rng_state()
    with pytest.raises(DataDependentOutputException):
        torch.rand(()).item()

    assert torch.equal(before, torch.get_rng_state())


def test_never_writes_the_real_inputs(mask: torch.Tensor) -> None:
    mask.fill_(7)

    assert mask.tolist() == [[7, 7, 7], [7, 7, 7]]
    assert MASK.tolist() == [[1, 1, 0], [1, 1, 1]]


def test_size_questions_give_real_tensors() -> None:
    fakes = FakeTensorMode()
    fake = fakes.from_tensor(MASK)
    found = Answers({id(fake): MASK}).answer(torch.Tensor.nonzero, (fake,), {})

    assert found.shape == (5, 2)
    assert Answers({}).answer(torch.Tensor.nonzero, (fake,), {}) is NotImplemented


def test_private_name_outside_modes() -> None:
    with FakeTensorMode(), outside_modes():
        assert type(torch.ones(2)) is torch.Tensor
        assert not torch.is_grad_enabled()


def test_private_name_size_hint() -> None:
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    fakes = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    size = fakes.from_tensor(torch.ones(4, 3), symbolic_context=context).shape[0]

    assert isinstance(size, torch.SymInt)
    assert size_hint(size) == 4
