"""The short way through fakes gives what FakeTensorMode gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rewrite.memory.quick import QuickFakes
from rewrite.memory.step import Run, run_step
from tests.memory.models import MODELS

aten = torch.ops.aten

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def calls(x: torch.Tensor, matrix: torch.Tensor) -> list[Call]:
    """Calls of every sort: views, products, elementwise, reductions, several results, in place, factories."""
    columns, row, mask = x.transpose(0, 2), matrix[0], torch.empty(4, 8, 16, dtype=torch.bool)
    return [
        (aten.view.default, (x, (32, 16)), {}),
        (aten._unsafe_view.default, (x, (32, 16)), {}),
        (aten.as_strided.default, (x, (4, 8), (8, 1), 3), {}),
        (aten.slice.Tensor, (x[:, 1:], 1, 2, 6, 2), {}),
        (aten.select.int, (x, 1, 2), {}),
        (aten.expand.default, (x[:1], (5, 8, 16)), {}),
        (aten.transpose.int, (columns, 0, 2), {}),
        (aten.detach.default, (x,), {}),
        (aten.split.Tensor, (x, 8, 2), {}),
        (aten.split.Tensor, (x, 5, 2), {}),
        (aten.mm.default, (matrix, matrix.t()), {}),
        (aten.addmm.default, (matrix[:, 0], matrix, matrix.t()), {}),
        (aten.bmm.default, (x, x.transpose(1, 2)), {}),
        (aten.mul.Tensor, (x, x), {}),
        (aten.mul.Tensor, (x, row), {}),
        (aten.mul.Tensor, (columns, columns), {}),
        (aten.mul.Tensor, (x, x.float()), {}),
        (aten.add.Tensor, (x, 1), {"alpha": 2}),
        (aten.gt.Scalar, (x, 0.0), {}),
        (aten.where.self, (mask, x, x), {}),
        (aten.silu_backward.default, (columns, x.permute(2, 1, 0)), {}),
        (aten.sum.dim_IntList, (columns, [0], True), {}),
        (aten.mean.dim, (x, [-1], True), {}),
        (aten.cat.default, ([x, columns.transpose(0, 2)], -1), {}),
        (aten.slice_backward.default, (x, [4, 8, 32], 2, 0, 16, 1), {}),
        (aten.clone.default, (columns,), {"memory_format": torch.contiguous_format}),
        (aten.clone.default, (columns,), {}),
        (aten._to_copy.default, (x,), {"dtype": torch.float64}),
        (aten.native_layer_norm.default, (x, [16], None, None, 1e-5), {}),
        (aten.add_.Tensor, (x, row), {}),
        (aten.masked_fill_.Scalar, (x, mask, 0.0), {}),
        (aten.copy_.default, (x, columns.transpose(0, 2)), {}),
        (aten.zeros.default, ([3, 4],), {"device": torch.device("cpu"), "pin_memory": False}),
        (aten.full.default, ([3], 1), {}),
        (aten.full.default, ([3], 1.0), {}),
        (aten.full.default, ([3], True), {}),
    ]


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(4, 8, 16, dtype=dtype), torch.empty(8, 16, dtype=dtype)


def described(value: Any, given: list[torch.Tensor]) -> Any:
    """Everything there is to a result, and which of the arguments it shares its storage with."""
    if isinstance(value, (tuple, list)):
        return type(value), [described(item, given) for item in value]
    if not isinstance(value, FakeTensor):
        return value
    storage = value.untyped_storage()
    shared = [place for place, tensor in enumerate(given) if tensor.untyped_storage()._cdata == storage._cdata]
    same = [place for place, tensor in enumerate(given) if tensor is value]
    layout = (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, storage.nbytes())
    keys = torch._C._dispatch_keys(value).raw_repr()
    return type(value), layout, value.requires_grad, keys, vars(value), shared, same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_call_met_again_gives_what_the_mode_gives(dtype: torch.dtype) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    quick = QuickFakes(mode)
    with mode:
        for _ in range(2):
            for func, args, kwargs in calls(*operands(dtype)):
                given = [tensor for tensor in torch.utils._pytree.tree_leaves(args) if isinstance(tensor, torch.Tensor)]
                expected = described(func(*args, **kwargs), given)

                assert described(quick.run(func, args, kwargs), given) == expected, func


def test_a_call_met_again_leaves_the_mode_alone() -> None:
    class Counting(FakeTensorMode):
        asked = 0

        def dispatch(self, *args: Any, **kwargs: Any) -> Any:
            self.asked += 1
            return super().dispatch(*args, **kwargs)

    mode = Counting(allow_non_fake_inputs=True)
    quick = QuickFakes(mode)
    with mode:
        for again in (False, True):
            made = calls(*operands(torch.float32))
            before = mode.asked
            for func, args, kwargs in made:
                quick.run(func, args, kwargs)
            assert (mode.asked > before) != again


def test_values_and_tensors_of_another_kind_are_asked_about_again() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    quick = QuickFakes(mode)
    with mode:
        x, number = torch.empty(4), torch.tensor(2.0)
        negated = torch.empty(4, dtype=torch.complex64).conj().imag
        for _ in range(2):
            assert quick.run(aten.neg.default, (torch.empty(()),), {}).constant is None
            assert quick.run(aten.neg.default, (number,), {}).constant == -2
            assert quick.run(aten.mul.Tensor, (x, 1j), {}).dtype == torch.complex64
            assert quick.run(aten.view.dtype, (x, torch.int32), {}).dtype == torch.int32
            assert quick.run(aten.alias.default, (negated,), {}).is_neg()
            assert not quick.run(aten.alias.default, (x,), {}).is_neg()
            assert quick.run(aten.mm.default, (x.view(2, 2), torch.ones(2, 8)), {}).shape == (2, 8)
        with pytest.raises(RuntimeError):
            quick.run(aten.mm.default, (x.view(2, 2), torch.ones(3, 8)), {})


def test_a_padded_storage_stays_padded() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    quick = QuickFakes(mode)
    with mode:
        q = torch.empty(2, 3, 49, 16)
        bias = torch.empty(2, 3, 49, 56)[..., :49]
        args = (q, q, q, bias, True, 0.0)
        out, rows, seed, offset = aten._scaled_dot_product_efficient_attention.default(*args)
        backward = (q, q, q, q, bias, out, rows, seed, offset, 0.0, [True] * 4)
        func = aten._scaled_dot_product_efficient_attention_backward.default
        given = [tensor for tensor in backward if isinstance(tensor, torch.Tensor)]
        first, second = (described(quick.run(func, backward, {}), given) for _ in range(2))

    assert second == first
    (_, (shape, *_, size), *_) = first[1][3]
    assert size > shape.numel() * q.itemsize


def models(*short: str) -> list[Any]:
    """Every model; those not named are for the sweep."""
    return [pytest.param(name, marks=() if name in short else pytest.mark.sweep) for name in MODELS]


def told(run: Run) -> Any:
    events = [(s.bytes, s.shape, s.dtype, s.category, s.place, change, phase) for s, change, phase in run.events]
    return events, len(run.saved), run.tally.work(), run.tally.flops, run.calls, run.assumptions


def assert_same_step(model: torch.nn.Module, inputs: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> Any:
        optimizer = "adamw" if device == "cuda" else None
        return told(run_step(model, inputs, optimizer=optimizer, device=device, train=True, real=False))

    def ask_the_mode(_: QuickFakes, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)

    quick = step()
    monkeypatch.setattr(QuickFakes, "run", ask_the_mode)
    assert quick == step()


@pytest.mark.thinned(6)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", models("bert", "llama", "swin", "resnet"))
def test_a_step_is_the_same_event_by_event(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_same_step(*MODELS[name](), device, monkeypatch)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", ["blocks", "sqrt"])
@pytest.mark.parametrize("name", models("llama"))
def test_a_recomputing_step_is_the_same_event_by_event(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import rewrite
    from passes import Checkpoint

    model, inputs = MODELS[name]()
    rewritten = rewrite.optimize(model, passes=[Checkpoint(policy=policy)], example_inputs=inputs)
    assert_same_step(rewritten, inputs, "cpu", monkeypatch)
