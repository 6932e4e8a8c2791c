"""Planning for CUDA on fake CPU tensors: the operators whose CUDA kernels save other bytes than the CPU's.

Each stand-in calls the operator that CUDA dispatches to; torch's own derivative formulas (derivatives.yaml) and meta
kernels then save what CUDA saves. Batch norm needs none: `cudnn_batch_norm` saves the input and two statistics a
channel, as `native_batch_norm` does.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import _scoped_library

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Within the block, fakes behave as on `device`: "cpu" (nothing changes) or "cuda". Real tensors are left alone."""
    if device != "cuda":
        yield
        return
    with _scoped_library("aten", "IMPL") as library:
        for name, stand_in in STAND_INS.items():
            library.impl(name, _for_fakes(name, stand_in), "AutogradCPU")
        yield


def device_assumptions(module: nn.Module, device: str) -> tuple[str, ...]:
    """What a plan for `device` cannot know about a module's layers, one sentence for each layer."""
    if device != "cuda":
        return ()
    return tuple(
        f"{path or 'the root module'}: cuDNN does not publish how much a {type(layer).__name__} keeps for the "
        "backward; counted as the CPU kernels keep it"
        for path, layer in module.named_modules()
        if isinstance(layer, nn.RNNBase)
    )


def cuda_scratch_bytes(func: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Bytes a CUDA kernel holds while it runs, beyond its arguments and results.

    Flash attention's backward: the gradient of the queries in float32 and one float32 a row, both padded (`mha_bwd` in
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp).
    """
    if func is not aten._scaled_dot_product_flash_attention_backward.default:
        return 0
    batch, heads, rows, width = (int(size) for size in args[1].shape)
    rows = _rounded(rows, 128)
    width = _rounded(width, 32) if width <= 128 else _rounded(width, 64)
    return 4 * batch * heads * rows * (width + 1)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel CUDA picks: flash, else mem-efficient, else math (`_fused_sdp_choice_cuda` in sdp_utils.cpp)."""
    same = query.dtype == key.dtype == value.dtype
    fits = query.dim() == 4 and same and query.shape[-1] == value.shape[-1]
    if fits and attn_mask is None and query.dtype in HALF and query.shape[-1] <= 256:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    shares_heads = enable_gqa and query.shape[1] != key.shape[1]
    if fits and not shares_heads and query.dtype in (*HALF, torch.float32):
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Saves queries, keys, values, result, one float32 a row, and the seed; heads padded to a multiple of 8."""
    width = query.shape[-1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    missing = -width % 8
    if missing:
        query, key, value = (nn.functional.pad(each, (0, missing)) for each in (query, key, value))
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :width] if missing else out


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Saves queries, keys, values, result, one float32 a row (rows padded to 32), the seed, and the mask.

    A boolean mask becomes one of the queries' type, rows padded to 16 elements, and is expanded without a copy
    (`preprocess_mask` in transformers/attention.cpp).
    """
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), -math.inf)
        columns = bias.shape[-1]
        if columns % 16:
            bias = nn.functional.pad(bias, (0, -columns % 16))[..., :columns]
        bias = bias.expand(*query.shape[:-1], key.shape[-2])
    needs_rows = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    out: torch.Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_rows, dropout_p, is_causal, scale=scale
    )[0]
    return out


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Saves a mask of one byte an element (`is_fused_kernel_acceptable` in aten/src/ATen/native/Dropout.cpp)."""
    if not train or not 0 < p < 1 or x.numel() == 0:
        return aten.dropout.default.decompose(x, p, train)  # type: ignore[no-any-return]
    return torch.native_dropout(x, p, True)[0]


def _rms_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Saves its input and one float32 a row (`_fused_rms_norm` in derivatives.yaml), when the types are the same."""
    if weight is not None and weight.dtype != x.dtype:
        return aten.rms_norm.default.decompose(x, normalized_shape, weight, eps)  # type: ignore[no-any-return]
    out: torch.Tensor = _FusedRMSNorm.apply(x, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    return out


class _FusedRMSNorm(torch.autograd.Function):
    """The shapes of `_fused_rms_norm` and its backward, which have no kernel for CPU fakes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        rows = x.new_empty((*x.shape[: x.dim() - dims], *([1] * dims)), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


STAND_INS: dict[str, Callable[..., torch.Tensor]] = {
    "scaled_dot_product_attention": _attention,
    "dropout": _dropout,
    "rms_norm": _rms_norm,
}


def _for_fakes(name: str, stand_in: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    original = getattr(aten, name).default

    def kernel(first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(first, FakeTensor):
            return stand_in(first, *args, **kwargs)
        return original.decompose(first, *args, **kwargs)  # type: ignore[no-any-return]

    return kernel


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
