"""Hold the parameters of a module tree in another precision, and give its forward inputs that fit them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

WIDE = (torch.float32, torch.float64)
LOW = (torch.float16, torch.bfloat16)


def hold_low(root: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Replace the fp32 parameters and saved buffers of `root` by ones in `dtype`; returns what puts the old ones back.

    A parameter under several names stays one. Buffers that a state dict leaves out (tables of positions) stay.
    """
    return hold(root, WIDE, dtype)


def hold(root: nn.Module, kinds: Collection[torch.dtype], dtype: torch.dtype) -> Callable[[], None]:
    """The same for parameters and buffers whose dtype is among `kinds`."""
    made: dict[int, torch.Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype in kinds:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                replaced.append((module._parameters, name, parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in kinds and name not in module._non_persistent_buffers_set:
                made.setdefault(id(buffer), buffer.to(dtype))
                replaced.append((module._buffers, name, buffer))
    for table, name, tensor in replaced:
        table[name] = made[id(tensor)]

    def restore() -> None:
        for table, name, tensor in replaced:
            table[name] = tensor

    return restore


def lowered(value: Any, dtype: torch.dtype) -> Any:
    """Arguments of a call with the wide floating-point tensors among them cast."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in WIDE else value
    if type(value) in (tuple, list):
        return type(value)(lowered(item, dtype) for item in value)
    if type(value) is dict:
        return {key: lowered(item, dtype) for key, item in value.items()}
    return value
