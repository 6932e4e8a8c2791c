"""Memory of oneDNN's LSTM on a CPU: the workspace that it keeps for the backward, and what its kernels take below the
dispatcher.

Sizes as in oneDNN's src/cpu/rnn/rnn_utils.hpp (`set_conf`, `get_good_ld`), of one layer in one direction, and checked
against the allocator: of a step in float32 within 0.2%, in bfloat16 up to 13% low. The workspace is a result of the
operator, of which torch's fake has no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

PAGE = 4096
LINE = 64
"""Bytes of a cache line, which rows begin with."""
NUMBER = 4
"""Bytes of a number that is added up."""


def with_workspace(func: Callable[..., Any], args: tuple[Any, ...], out: Any) -> Any:
    """What the operator gave, its workspace as large as it is on real tensors."""
    if func is not aten.mkldnn_rnn_layer.default or out[3].numel():
        return out
    return (*out[:3], out[3].new_empty(workspace_bytes(args[0], args[2])))


def workspace_bytes(x: torch.Tensor, weight: torch.Tensor) -> int:
    """`x`: (length, batch, input width); `weight`: (4 x width, width), that of the hidden state.

    Gates, and for each step and one more, twice: states of the layer and of the step before, and gradients of these.
    """
    rows, states, size = _rows(x), 2 * (x.shape[0] + 1) * x.shape[1], x.itemsize
    width, widest = weight.shape[1], max(weight.shape[1], x.shape[2])
    return (
        _pages(rows * _row_bytes(4 * width, size))
        + _pages(rows * _row_bytes(width, size))
        + _pages(states * _row_bytes(widest, size))
        + 2 * _pages(states * _row_bytes(widest, NUMBER))
        + _pages(states * width * NUMBER)
        + _pages(states * width * size)
    )


def forward_bytes(x: torch.Tensor, weight: torch.Tensor) -> int:
    """Weights in rows of their own, the gates once more, and states and biases of a step."""
    width, size = weight.shape[1], x.itemsize
    gates = _row_bytes(4 * width, size)
    state, bias = _pages(x.shape[1] * width * NUMBER), 4 * width * NUMBER
    return (x.shape[2] + width) * gates + _pages(_rows(x) * gates) + 2 * state + bias + _pages(bias)


def backward_bytes(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor | None) -> int:
    """As the forward, with the gradients of two states, and of weights whose rows do not lie as torch's do.

    `grad`, that of the results, is made dense first.
    """
    dense = 0 if grad is None or grad.is_contiguous() else grad.numel() * grad.itemsize
    width, size = weight.shape[1], x.itemsize
    padded = (_row_bytes(each, size) for each in (x.shape[2], width) if _row_bytes(each, size) != each * size)
    return dense + forward_bytes(x, weight) + 2 * x.shape[1] * width * NUMBER + 4 * width * sum(padded)


def _rows(x: torch.Tensor) -> int:
    return int(x.shape[0] * x.shape[1])


def _row_bytes(count: int, size: int) -> int:
    """Bytes of a row of `count` numbers: whole lines, and one more where rows would lie 256 numbers apart."""
    line = LINE // size
    length = -(-count // line) * line
    return (length + line if length % 256 == 0 else length) * size


def _pages(count: int) -> int:
    return -(-count // PAGE) * PAGE
