"""Sizes: which are symbols, how they are written back into a graph, and when a graph may serve again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from rewrite.capture import private


def symbolic_dimensions(tensors: Sequence[torch.Tensor], level: int) -> list[set[int]]:
    """Which dimensions of the inputs become symbols.

    Level 0: batch (dimension 0) and sequence (dimension 1 of two- and three-dimensional inputs), and any dimension of
    a larger input that has one of those sizes (a mask). Level 1: the batch only. Level 2: none.
    """
    if level == 2:
        return [set() for _ in tensors]
    batch = [{0} if tensor.ndim else set() for tensor in tensors]
    if level == 1:
        return batch
    lengths = {tensor.shape[1] for tensor in tensors if tensor.ndim in (2, 3) and not tensor.is_floating_point()}
    lengths |= {tensor.shape[1] for tensor in tensors if tensor.ndim == 2}
    chosen = []
    for tensor, dims in zip(tensors, batch, strict=True):
        more = {1} if tensor.ndim in (2, 3) else set()
        more |= {d for d in range(1, tensor.ndim - (tensor.is_floating_point())) if tensor.shape[d] in lengths}
        chosen.append(dims | more)
    return chosen


@dataclass
class Sizes:
    """Writes symbolic numbers into one graph, as arithmetic on the sizes of its inputs."""

    graph: fx.Graph
    known: dict[sympy.Expr, Any] = field(default_factory=dict)
    """Expression -> proxy or number."""

    def bind(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """Let later expressions use the sizes of `tensor`, the value of `node`."""
        for dimension, size in enumerate(tensor.shape):
            if not isinstance(size, torch.SymInt):
                continue
            expr = private.expression(size)
            if expr.is_number or expr in self.known:
                continue
            self.known[expr] = self.proxy(self.graph.call_method("size", (node, dimension)))

    def bind_number(self, node: fx.Node, number: Any) -> None:
        if isinstance(number, torch.SymInt) and not private.expression(number).is_number:
            self.known.setdefault(private.expression(number), self.proxy(node))

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return fx.Proxy(node, fx.proxy.GraphAppendingTracer(self.graph))

    def write(self, number: torch.SymInt | torch.SymFloat) -> Any:
        """A node, or a plain number, that has the value of `number`. Raises KeyError for a size no input gives."""
        expr = private.expression(number)
        if expr.is_number:
            return int(expr) if isinstance(number, torch.SymInt) else float(expr)
        if expr not in self.known:
            environment = {key: value for key, value in self.known.items() if isinstance(key, sympy.Symbol)}
            missing = private.free_symbols(expr) - set(environment)
            if missing:
                raise KeyError(f"size {expr} is not a size of any input")
            self.known[expr] = private.evaluate(expr, environment)
        value = self.known[expr]
        return value.node if isinstance(value, fx.Proxy) else value


Predicate = Callable[[Sequence[Any]], bool]


def size_predicate(leaves: Sequence[Any], conditions: Sequence[sympy.Basic]) -> tuple[Predicate, str]:
    """A predicate on the leaves of a call: do they have the sizes this graph was captured for?

    `leaves` are the fakes of the capture (tensors, whole numbers, objects). A symbol's first plain appearance names
    it; every other size must equal its expression. Returns the predicate and its Python text.
    """
    names: dict[sympy.Expr, str] = {}
    checks: list[str] = []
    sizes: list[tuple[str, int | torch.SymInt]] = [
        (f"x[{i}].shape[{d}]", s)
        for i, x in enumerate(leaves)
        if isinstance(x, torch.Tensor)
        for d, s in enumerate(x.shape)
    ]
    sizes += [(f"x[{i}]", x) for i, x in enumerate(leaves) if isinstance(x, (int, torch.SymInt))]
    for text, size in sizes:
        expr = private.expression(size) if isinstance(size, torch.SymInt) else sympy.Integer(int(size))
        if expr.is_Symbol and expr not in names:
            names[expr] = text
            checks.append(f"{text} >= 2")
    for text, size in sizes:
        expr = private.expression(size) if isinstance(size, torch.SymInt) else sympy.Integer(int(size))
        written = _write(expr, names)
        if written is None:
            names[expr] = text
        elif written != text:
            checks.append(f"{text} == {written}")
    unknown = False
    for condition in conditions:
        written = _write(condition, names)
        unknown |= written is None
        checks.append(written or "True")
    if unknown:  # a relation between sizes this call does not show: serve the captured sizes only
        checks += [f"{text} == {private.hint(size)}" for text, size in sizes if private.has_hint(size)]
    source = " and ".join(dict.fromkeys(f"({check})" for check in checks if check not in ("True", "(True)"))) or "True"
    scope = {"math": math, "Max": max, "Min": min, "torch": torch}
    predicate: Predicate = eval(f"lambda x: {source}", scope)
    return predicate, source


def _write(expr: sympy.Basic, names: dict[sympy.Expr, str]) -> str | None:
    """Python text of `expr` with each named size in place of its symbol; None when a symbol has no name."""
    if expr in names:
        return names[expr]
    symbols = private.free_symbols(expr)
    if not symbols <= set(names):
        return None
    stand_ins = {
        symbol: sympy.Symbol(f"_size{index}_", integer=True) for index, symbol in enumerate(sorted(symbols, key=str))
    }
    text = private.print_expression(expr.xreplace(stand_ins))
    for symbol, stand_in in stand_ins.items():
        text = text.replace(stand_in.name, names[symbol])
    return text
