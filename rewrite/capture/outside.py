"""Private torch names that let a real value be computed while fake tensors and modes are active."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Leave every dispatch and torch-function mode, and autograd, for the length of the block."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def size_hint(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> int | float | bool | None:
    """The number a symbolic size stands for in this run, without making a guard; None when nothing is known."""
    hint: int | float | bool | None = value.node.hint
    return hint
