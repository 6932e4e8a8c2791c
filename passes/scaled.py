"""Multiply in the forward, and by another factor in the backward."""

from __future__ import annotations

from typing import Any

import torch


class Scaled:
    """`value * forward`, whose gradient is multiplied by `backward`.

    For a product computed on a fraction of its rows, so that its result fits in fp16: with 1/16 and 1 on rows and bias,
    1 and 16 on the weight, 16 and 1 on the result, every gradient is what it was, and none on the way is larger.
    """

    __module__ = "passes.scaled"

    def __init__(self, forward: float, backward: float) -> None:
        self.forward, self.backward = forward, backward
        self.__name__ = self.__qualname__ = "mul"

    def __repr__(self) -> str:
        return f"mul{{forward={self.forward},backward={self.backward}}}"

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Scale.apply(value, self.forward, self.backward)  # type: ignore[no-untyped-call]
        return result


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.factor = backward
        return value * forward if forward != 1 else value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (grads[0] * ctx.factor if ctx.factor != 1 else grads[0]), None, None
