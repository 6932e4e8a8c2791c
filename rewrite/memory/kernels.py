"""Fake kernels of ours, where torch's refuse what the real kernel takes, or give another layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The result of `aten._grouped_mm`, empty: torch's fake kernel takes bfloat16 only, the CPU kernel float32 too."""
    if left.dim() == 2 and right.dim() == 2:
        assert offs is not None
        shape: tuple[int, ...] = (offs.shape[0], left.shape[0], right.shape[1])
    elif left.dim() == 2:
        shape = (left.shape[0], right.shape[-1])
    elif right.dim() == 2:
        shape = (left.shape[1], right.shape[1])
    else:
        shape = (left.shape[0], left.shape[1], right.shape[-1])
    return torch.empty(shape, dtype=out_dtype or left.dtype)


def layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Contiguous gradients, as the kernel makes them; torch's fake kernel follows the strides of the gradient."""
    like = (x, weight, bias)
    return tuple(
        torch.empty(tensor.shape, dtype=tensor.dtype) if wanted and tensor is not None else None
        for tensor, wanted in zip(like, mask, strict=True)
    )


def ctc_loss(log_probs: torch.Tensor, longest_target: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each sample, and the forward variables: [batch, time, 2 * longest target + 1], float as `log_probs`."""
    time, batch = log_probs.shape[0], log_probs.shape[1]
    alpha = torch.empty(batch, time, 2 * longest_target + 1, dtype=log_probs.dtype)
    return torch.empty(batch, dtype=log_probs.dtype), alpha


FAKE_KERNELS: Mapping[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: grouped_mm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
}
