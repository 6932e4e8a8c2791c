"""Every private name of torch and transformers that capture uses: what breaks on the next release, one test each."""

from __future__ import annotations

import inspect

import pytest
import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers.utils import import_utils, output_capturing

from rewrite.capture import outside, private


def fake(*sizes: int, dynamic: set[int]) -> tuple[torch.Tensor, private.FakeTensorMode]:
    mode = private.symbolic_fake_mode()
    return private.make_fake(mode, torch.ones(*sizes), "input_0", dynamic), mode


def test_every_name_of_the_module_is_tested_here() -> None:
    names = {name for name, value in vars(private).items() if getattr(value, "__module__", "") == private.__name__}
    names |= {"set_grad_enabled", "CHECKPOINT_GENERATOR", *private.__all__}
    names |= {"outside_modes", "size_hint"}
    told = inspect.getsource(__import__(__name__, fromlist=["x"]))
    assert sorted(name for name in names if f".{name}" not in told) == []


def test_set_grad_enabled_reaches_a_function_mode() -> None:
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch(), torch.no_grad():
        assert not torch.is_grad_enabled()
    assert seen == [private.set_grad_enabled] * 2
    assert torch.is_grad_enabled()


def test_the_autocast_context_has_the_attributes_that_are_read() -> None:
    context = torch.autocast("cpu", dtype=torch.bfloat16)
    read = (context.device, context.fast_dtype, context._enabled, context._cache_enabled)
    assert read == ("cpu", torch.bfloat16, True, True)


def test_checkpoint_runs_through_the_generator_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = private.CHECKPOINT_GENERATOR
    original, begun = getattr(owner, name), []

    def generator(*args, **kwargs):  # type: ignore[no-untyped-def]
        begun.append(args)
        yield from original(*args, **kwargs)

    monkeypatch.setattr(owner, name, generator)
    hidden = torch.ones(2, requires_grad=True)
    checkpoint(torch.tanh, hidden, use_reentrant=False).sum().backward()
    assert len(begun) == 1
    assert hidden.grad is not None


def test_make_fake_has_symbols_where_asked_and_equal_sizes_share_one() -> None:
    mode = private.symbolic_fake_mode()
    one = private.make_fake(mode, torch.ones(3, 5, 4), "input_0", {0, 1})
    other = private.make_fake(mode, torch.ones(5, 7), "input_1", {0})
    assert isinstance(one, private.FakeTensor)
    assert isinstance(mode, private.FakeTensorMode)
    assert isinstance(mode.shape_env, private.ShapeEnv)
    assert private.expression(one.shape[1]) == private.expression(other.shape[0])
    assert private.expression(one.shape[0]) != private.expression(one.shape[1])
    assert type(one.shape[2]) is type(other.shape[1]) is int


def test_make_fake_makes_no_symbol_of_sizes_zero_and_one() -> None:
    tensor, _ = fake(1, 0, 3, dynamic={0, 1, 2})
    assert [isinstance(size, torch.SymInt) for size in tensor.shape] == [False, False, True]


def test_symbolic_fake_mode_lets_real_tensors_in() -> None:
    tensor, mode = fake(3, dynamic=set())
    with mode:
        assert isinstance(tensor + torch.ones(3), private.FakeTensor)


def test_expression_and_hint() -> None:
    tensor, _ = fake(3, 4, dynamic={0})
    doubled = 2 * tensor.shape[0] + 1
    assert private.expression(doubled) == 2 * private.expression(tensor.shape[0]) + 1
    assert private.hint(doubled) == 7
    assert private.hint(4) == 4
    assert private.has_hint(doubled)
    assert private.has_hint(4)
    assert outside.size_hint(doubled) == 7
    assert outside.size_hint(doubled > 3) is True


def test_has_hint_says_no_for_a_size_that_depends_on_data() -> None:
    tensor, mode = fake(3, dynamic={0})
    with mode, private.enable_python_dispatcher():
        size = tensor.nonzero().shape[0]
        with pytest.raises(GuardOnDataDependentSymNode):
            bool(size == 7)
    assert not private.has_hint(size)


def test_evaluate_carries_out_an_expression_over_numbers_and_proxies() -> None:
    size = sympy.Symbol("s0", integer=True, positive=True)
    assert private.evaluate(2 * size + 3, {size: 5}) == 13
    graph = fx.Graph()
    proxy = fx.Proxy(graph.placeholder("n"), fx.proxy.GraphAppendingTracer(graph))
    graph.output(private.evaluate(2 * size + 3, {size: proxy}).node)
    assert fx.GraphModule({}, graph)(5) == 13


def test_print_expression_is_python() -> None:
    tensor, mode = fake(7, 4, dynamic={0})
    size = tensor.shape[0]
    symbol = private.expression(size)
    for value in ((size + 1) // 2, size % 3, 3 * size - 1):
        text = private.print_expression(private.expression(value))
        assert eval(text, {str(symbol): 7, "math": __import__("math")}) == private.hint(value), text
    assert bool(size > 4)
    (guard,) = private.guards(mode)  # type: ignore[arg-type]
    assert eval(private.print_expression(guard), {str(symbol): 7}) is True
    assert eval(private.print_expression(guard), {str(symbol): 3}) is False
    assert private.free_symbols(guard) == {symbol}


def test_replacements_name_symbols_found_equal_to_a_number() -> None:
    tensor, mode = fake(3, 5, dynamic={0, 1})
    symbol = private.expression(tensor.shape[0])
    assert tensor.shape[0] == 3
    assert private.replacements(mode) == {symbol: 3}  # type: ignore[arg-type]
    assert private.expression(tensor.shape[0]) == 3


def test_enable_python_dispatcher_keeps_sizes_symbolic_through_operators() -> None:
    tensor, mode = fake(3, 4, dynamic={0})
    with mode, private.enable_python_dispatcher():
        out = torch.nn.functional.layer_norm(tensor.tril(), (4,))
    assert isinstance(out.shape[0], torch.SymInt)


def test_transformers_sees_real_tensors_for_the_length_of_the_block() -> None:
    tensor, _ = fake(3, dynamic=set())
    original = import_utils.is_fake_tensor
    assert original(tensor)
    with private.transformers_sees_real_tensors():
        assert not import_utils.is_fake_tensor(tensor)
    assert import_utils.is_fake_tensor is original


def test_transformers_collects_nothing_for_the_length_of_the_block() -> None:
    collector = output_capturing._active_collector
    token = collector.set({"hidden_states": []})
    try:
        with private.transformers_collects_nothing():
            assert collector.get() is None
        assert collector.get() == {"hidden_states": []}
    finally:
        collector.reset(token)


def test_outside_modes_gives_real_tensors_that_no_mode_sees() -> None:
    class Fail(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError(func)

    with private.symbolic_fake_mode(), Fail(), outside.outside_modes():
        made = torch.ones(2) + 1
        assert made.tolist() == [2, 2]
        assert not torch.is_grad_enabled()
    assert type(made) is torch.Tensor
    assert torch.is_grad_enabled()


def test_the_quotient_of_two_sizes_is_a_float() -> None:
    assert private._SizeArithmetic.int_truediv(3, 2) == 1.5
