"""Every private name of torch and transformers that capture uses, each behind a name of our own.

They are what breaks on the next release, so each has a test of its own in `tests/capture/test_private.py`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

__all__ = ["FakeTensor", "FakeTensorMode", "ShapeEnv", "enable_python_dispatcher"]

set_grad_enabled = torch._C._set_grad_enabled
CHECKPOINT_GENERATOR = (torch_checkpoint, "_checkpoint_without_reentrant_generator")


def symbolic_fake_mode() -> FakeTensorMode:
    """Fake tensors whose marked sizes are symbols; equal sizes share one."""
    env = ShapeEnv(duck_shape=True, assume_static_by_default=False, specialize_zero_one=True)
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)


def make_fake(mode: FakeTensorMode, tensor: torch.Tensor, label: str, dynamic: set[int]) -> torch.Tensor:
    """A fake of `tensor` whose dimensions in `dynamic` are symbols."""
    marks = [DimDynamic.DUCK if d in dynamic else DimDynamic.STATIC for d in range(tensor.ndim)]
    context: Any = StatelessSymbolicContext(dynamic_sizes=marks)
    return mode.from_tensor(tensor, source=ConstantSource(label), symbolic_context=context)


def expression(size: torch.SymInt | torch.SymFloat | torch.SymBool) -> sympy.Expr:
    """The sympy expression behind a symbolic number, simplified by what is known so far."""
    node = size.node
    return node.shape_env.simplify(node.expr)


def hint(size: Any) -> int:
    """The concrete value a symbolic size has for the example inputs."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def has_hint(size: Any) -> bool:
    return not isinstance(size, torch.SymInt) or size.node.has_hint()


def evaluate(expr: sympy.Expr, environment: dict[sympy.Symbol, Any]) -> Any:
    """Carry out a size expression over fx proxies or whole numbers."""
    return sympy_interp(_SizeArithmetic, environment, expr)


class _SizeArithmetic(PythonReferenceAnalysis):
    """Size arithmetic by Python's operators, which fx proxies record too."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        """The quotient of two whole numbers, as a float."""
        return a / b


def print_expression(expr: sympy.Basic) -> str:
    """Python text of a size expression or guard."""
    return str(PythonPrinter().doprint(expr))


def guards(mode: FakeTensorMode) -> list[sympy.Basic]:
    """The relations between sizes that the run relied on, in order."""
    return [guard.expr for guard in mode.shape_env.guards] if mode.shape_env is not None else []


def replacements(mode: FakeTensorMode) -> dict[sympy.Symbol, sympy.Expr]:
    """Symbols found equal to a number or another symbol."""
    return dict(mode.shape_env.replacements) if mode.shape_env is not None else {}


def free_symbols(expr: sympy.Basic) -> set[sympy.Symbol]:
    return {symbol for symbol in expr.free_symbols if isinstance(symbol, sympy.Symbol)}


@contextlib.contextmanager
def transformers_sees_real_tensors() -> Iterator[None]:
    """transformers builds other masks when it is given fake tensors; make it take the path of a real run."""
    utils: Any = sys.modules.get("transformers.utils.import_utils")
    if utils is None or not hasattr(utils, "is_fake_tensor"):
        yield
        return
    original: Any = vars(utils)["is_fake_tensor"]
    utils.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        utils.is_fake_tensor = original


@contextlib.contextmanager
def transformers_collects_nothing() -> Iterator[None]:
    """transformers collects hidden states through hooks, into a list of the call that runs: keep ours out of it."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is None:
        yield
        return
    token = collector.set(None)
    try:
        yield
    finally:
        collector.reset(token)
