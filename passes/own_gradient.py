"""An identity whose gradient lies in storage of its own, rather than being a part of a larger gradient."""

from __future__ import annotations

from typing import Any

import torch


def same_strides(tensor: torch.Tensor) -> torch.Tensor:
    """A view with the very strides.

    `view_as` sets those of dimensions of size one anew, and a kernel then may take a single image for one in another
    memory format.
    """
    view: torch.Tensor = torch.ops.aten.alias.default(tensor)
    return view


def own_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is; its gradient no longer keeps alive what it was cut from."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor
    result: torch.Tensor = _OwnGradient.apply(tensor)  # type: ignore[no-untyped-call]
    return result


class _OwnGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor) -> torch.Tensor:
        return same_strides(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        return None if grad is None else without_the_rest(grad)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return same_strides(tangent)


def without_the_rest(grad: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor that is a part of a larger storage; any other as it is."""
    try:
        storage_bytes = grad.untyped_storage().nbytes()
    except NotImplementedError:  # what stands for a tensor inside a transform of torch.func has no storage to tell of
        return grad
    return grad.clone() if storage_bytes > grad.numel() * grad.element_size() else grad
