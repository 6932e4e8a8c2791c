"""What is asked of tensors that autograd saves, and made of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter, or a view of one: there anyway."""
    kind = type(tensor)
    if kind is nn.Parameter:
        return True
    base = tensor._base
    if kind is torch.Tensor and (base is None or type(base) is torch.Tensor):
        return False
    return type(base) is nn.Parameter or isinstance(tensor, nn.Parameter) or isinstance(base, nn.Parameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is no more than its storage: dense, and not of a class that somebody added."""
    return type(tensor) in (torch.Tensor, FakeTensor) and tensor.layout == torch.strided


def version_of(tensor: torch.Tensor) -> int:
    """How often it has been written."""
    return 0 if tensor.is_inference() else tensor._version


def detached(value: Any) -> Any:
    """A value, or those in a tuple or list, without its graph."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return type(value)(map(detached, value)) if type(value) in (tuple, list) else value


def leaf_of(value: Any, need_grad: bool) -> Any:
    """An input for a run of one operator by itself."""
    return value.detach().requires_grad_(need_grad) if isinstance(value, torch.Tensor) else value


def never(_: Any) -> Any:
    """In the place of an unpack hook that is not to be called."""
    raise AssertionError("no backward goes through a run that is made for what its operators save")
