"""The short way through fake tensors for the operators that fill a training step.

FakeTensorMode spends most of its time on keys of its cache. Two kinds of operators need none. Views and products: their
meta kernels are C++, they give one tensor, and no rule of FakeTensorMode is about them. Elementwise operators on dense
floating tensors of one shape and type: the result is like the operand. Private torch names:
`in_kernel_invocation_manager` and the constructor of `FakeTensor`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

aten = torch.ops.aten

_CPU = torch.device("cpu")

DIRECT = frozenset(
    {
        aten.as_strided.default,
        aten.bmm.default,
        aten.detach.default,
        aten.expand.default,
        aten.mm.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.dim,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.view.default,
        aten._unsafe_view.default,
    }
)
"""Run on their meta kernels."""

ELEMENTWISE = frozenset(
    {
        aten.add.Tensor,
        aten.div.Scalar,
        aten.div.Tensor,
        aten.exp.default,
        aten.gelu.default,
        aten.gelu_backward.default,
        aten.mul.Scalar,
        aten.mul.Tensor,
        aten.neg.default,
        aten.pow.Tensor_Scalar,
        aten.rsqrt.default,
        aten.sigmoid.default,
        aten.silu.default,
        aten.silu_backward.default,
        aten.sub.Tensor,
        aten.tanh.default,
        aten.tanh_backward.default,
    }
)
"""Give a tensor like their operands, when those are alike."""


class QuickFakes:
    """Runs some operators on the fakes of one mode; the result is what FakeTensorMode gives."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def run(self, func: Callable[..., Any], args: tuple[Any, ...]) -> torch.Tensor | None:
        """The fake result; None where FakeTensorMode has to be asked."""
        if func in DIRECT:
            if type(args[0]) is not FakeTensor or (len(args) > 1 and not _fake_or_plain(args[1])):
                return None
            with in_kernel_invocation_manager(self._mode):
                return FakeTensor(self._mode, func(*args), _CPU)
        if func in ELEMENTWISE and _alike(args):
            with in_kernel_invocation_manager(self._mode):
                return FakeTensor(self._mode, aten.empty_like.default(args[0]), _CPU)
        return None


def _fake_or_plain(value: Any) -> bool:
    return type(value) is FakeTensor or not isinstance(value, torch.Tensor)


def _alike(args: tuple[Any, ...]) -> bool:
    """Whether the tensors are dense fakes of one shape and one floating type, and the numbers real ones."""
    first = args[0]
    if type(first) is not FakeTensor or not first.is_floating_point() or not first.is_contiguous():
        return False
    for other in args[1:]:
        if isinstance(other, torch.Tensor):
            if type(other) is not FakeTensor or other.shape != first.shape or other.dtype != first.dtype:
                return False
            if not other.is_contiguous():
                return False
        elif isinstance(other, complex):
            return False
    return True
