"""What a training step starts its backward from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch

from rewrite.errors import InputError

NO_LOSS = "the sum of every floating tensor of the output (it has no loss)"
OUTSIDE = "what a loss outside the model holds and takes: have its forward return the loss, and it counts"


def pick_loss(output: Any) -> tuple[torch.Tensor, str]:
    """The loss in a model's output, and a sentence that says which it is.

    `output.loss` (or `output["loss"]`); else the output itself when it is a scalar; else the first element of a tuple
    when that is a scalar; else the sum of every floating tensor that takes part in the graph. Raises InputError when
    nothing of the output needs a gradient.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if _is_scalar(named):
        return named, "the output's loss"
    if _is_scalar(output):
        return output, "the output, a scalar"
    if isinstance(output, (tuple, list)) and output and _is_scalar(output[0]):
        return output[0], "the first element of the output, a scalar"
    parts = [tensor.sum() for tensor in _floating(output)]
    if not parts:
        raise InputError(
            "the model's output",
            "no floating point tensor in it depends on anything that requires a gradient, so there is no step to run",
            "unfreeze a parameter, or measure the forward alone with train=False",
        )
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total, NO_LOSS


def _is_scalar(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad


def _floating(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.requires_grad:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _floating(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _floating(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _floating(getattr(value, name))
