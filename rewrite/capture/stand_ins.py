"""Results of a few functions, by description alone: running them on symbolic fakes fails, or takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What attention returns, by description alone: its decomposition on symbolic sizes takes seconds."""
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out.requires_grad_().clone() if needs_grad else out


def _grouped_matmul(left: torch.Tensor, right: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What a grouped matrix product returns, by description alone: on fakes it takes bfloat16 only."""
    shape = (*left.shape[:-1], right.shape[-1]) if right.ndim >= left.ndim else (left.shape[0], right.shape[-1])
    out = left.new_empty(shape, dtype=kwargs.get("out_dtype") or left.dtype)
    needs_grad = torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
    return out.requires_grad_().clone() if needs_grad else out


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    """What `ctc_loss` returns, by description alone: on fakes it asks for the longest target."""
    out = log_probs.new_empty(log_probs.shape[1:2] if reduction == "none" and log_probs.ndim == 3 else ())
    return out.requires_grad_().clone() if torch.is_grad_enabled() and log_probs.requires_grad else out


STAND_INS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.ctc_loss: _ctc_loss,
    torch.nn.functional.scaled_dot_product_attention: _attention,
    **{
        getattr(home, name): _grouped_matmul
        for home, name in ((torch, "_grouped_mm"), (torch.nn.functional, "grouped_mm"))
        if hasattr(home, name)
    },
}
"""Functions whose result capture describes by itself rather than by running them on fakes."""
