"""Memory that CPU kernels take below the dispatcher, where no mode sees it: oneDNN's copies in its own layout, the
patches of images that a convolution in a half precision multiplies by where oneDNN has none for the processor, the
tiles of attention (`rewrite.memory.attention_scratch`), and what an LSTM takes (`rewrite.memory.lstm_scratch`).

These are real allocations of torch's CPU allocator, gone when the operator returns. Everything else a kernel takes
there is small, and named among what is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rewrite.memory import attention_scratch, lstm_scratch

aten = torch.ops.aten


def scratch_bytes(func: Callable[..., Any], args: tuple[Any, ...], out: Any) -> int:
    """Bytes a CPU operator holds at its worst moment beyond its arguments and its results."""
    counted = COUNTED.get(func)
    return 0 if counted is None else counted(args, out)


def _convolution_bytes(args: tuple[Any, ...], out: Any) -> int:
    x, weight, _, stride, padding, dilation, transposed = args[:7]
    dense = _made_dense(x, weight, x, weight)
    if _unfolds(x, dilation, transposed):
        return dense + _unfolded_forward_bytes(x, out, _columns(weight, out, x, stride, padding), args[8])
    if not _reorders(x, weight, stride, dilation, transposed, args[8]):
        return dense
    fills = not transposed and _fills(x, weight, stride, dilation, args[8])
    return dense + _forward_bytes(x, weight, out, fills)


def _convolution_backward_bytes(args: tuple[Any, ...], out: Any) -> int:
    grad, x, weight, _, stride, padding, dilation, transposed = args[:8]
    dense = _made_dense(x, weight, grad, x, weight)
    if _unfolds(x, dilation, transposed):
        columns = _columns(weight, grad, x, stride, padding)
        return dense + _unfolded_backward_bytes(grad, x, out, columns, args[9])
    if not _reorders(x, weight, stride, dilation, transposed, args[9]):
        return dense
    fills = not transposed and _fills(x, weight, stride, dilation, args[9])
    return dense + _backward_bytes(grad, x, weight, out, fills)


COUNTED: dict[Callable[..., Any], Callable[[tuple[Any, ...], Any], int]] = {
    aten.convolution.default: _convolution_bytes,
    aten.convolution_backward.default: _convolution_backward_bytes,
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda args, _: attention_scratch.forward_bytes(
        *args[:2]
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        lambda args, _: attention_scratch.backward_bytes(*args[:3])
    ),
    aten.mkldnn_rnn_layer.default: lambda args, _: lstm_scratch.forward_bytes(args[0], args[2]),
    aten.mkldnn_rnn_layer_backward.default: (lambda args, _: lstm_scratch.backward_bytes(args[0], args[2], args[10])),
}
"""Operator -> bytes from its arguments and its results."""


def _made_dense(x: torch.Tensor, weight: torch.Tensor, *given: torch.Tensor) -> int:
    """Bytes of the copies of those of `given` that are not dense in the layout that the convolution runs in."""
    last = any(each.dim() == 4 and not each.is_contiguous() and _is_channels_last(each) for each in (x, weight))
    layout = torch.channels_last if last else torch.contiguous_format
    return sum(_nbytes(each) for each in given if not each.is_contiguous(memory_format=layout))


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def _forward_bytes(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, fills: bool) -> int:
    """Input, weight and result in blocks; then the blocked result beside the plain one (mkldnn/Conv.cpp)."""
    given, made = _blocks(x, out, fills)
    if given > x.shape[1] and x.shape[1] < WIDE:  # a few channels are read as they lie
        given = 0
    blocked = _blocked(x, given) + _blocked_weight(weight, x, given, out, made) + _blocked(out, made)
    return max(blocked, _nbytes(out) + _blocked(out, made)) - _nbytes(out)


def _backward_bytes(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, out: Sequence[torch.Tensor | None], fills: bool
) -> int:
    """First the input's gradient, of blocked gradient and weight; then the weight's, of blocked gradient and input."""
    dx, dw = (0 if made is None else _nbytes(made) for made in out[:2])
    moments = [0]
    if dx:
        given, made = _blocks(x, grad, fills)
        weights = _blocked_weight(weight, x, given, grad, made)
        moments += [_blocked(grad, made) + weights + _blocked(x, given), dx + _blocked(x, given)]
    if dw:
        given, made = _blocks(x, grad, fills, small=True)
        weights = _blocked_weight(weight, x, given, grad, made)
        moments += [dx + _blocked(grad, made) + _blocked(x, given) + weights, dx + dw + weights]
    return max(0, max(moments) - dx - dw)


FLAT, NARROW, WIDE = 3, 8, 16
"""Channels that oneDNN leaves as they are in an image, and those of its blocks."""


def _fills(x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int) -> bool:
    """Whether blocks are filled up, as the allocator tells of processors with 512-bit registers: for kernels of three
    pixels and more in steps of one. Of other convolutions as if all channels filled their blocks."""
    plain = groups == 1 and x.dim() == 4 and all(step == 1 for step in (*stride, *dilation))
    return plain and min(weight.shape[2:]) >= 3 and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _blocks(x: torch.Tensor, made: torch.Tensor, fills: bool, *, small: bool = False) -> tuple[int, int]:
    """Channels of the input and of the result in blocks.

    Blocks are of 16; for the gradient of the weight (`small`) of 8 where there are no more, and images of up to three
    channels stay as they are.
    """
    given, results = int(x.shape[1]), int(made.shape[1])
    if not fills:
        return given, results
    if not small:
        return _filled(given, WIDE), _filled(results, WIDE)
    narrow = given < WIDE and (results <= NARROW or (results > WIDE and given > FLAT))
    results = _filled(results, NARROW if narrow else WIDE)
    if given <= FLAT and results > NARROW:
        return 0, results
    return _filled(given, NARROW if given <= NARROW else WIDE), results


def _filled(channels: int, block: int) -> int:
    return -(-channels // block) * block


def _blocked(tensor: torch.Tensor, channels: int) -> int:
    """Bytes of an image's tensor with so many channels."""
    return _nbytes(tensor) // int(tensor.shape[1]) * channels


def _blocked_weight(weight: torch.Tensor, x: torch.Tensor, given: int, made: torch.Tensor, results: int) -> int:
    """Bytes of the weight between so many channels, 0 for those that the input has."""
    inside, outside = int(x.shape[1]), int(made.shape[1])
    return _nbytes(weight) * (given or inside) * results // (inside * outside)


def _unfolds(x: torch.Tensor, dilation: Sequence[int], transposed: bool) -> bool:
    """Whether the convolution is a product with patches (ATen/native/ConvolutionMM2d.cpp)."""
    supported = {torch.float16: "_is_mkldnn_fp16_supported", torch.bfloat16: "_is_mkldnn_bf16_supported"}.get(x.dtype)
    if supported is None or transposed or any(step != 1 for step in dilation):
        return False
    return not (torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, supported)())


def _columns(
    weight: torch.Tensor, made: torch.Tensor, x: torch.Tensor, stride: Sequence[int], padding: Sequence[int]
) -> int:
    """Bytes of one group's patches of all images, which are the images themselves for a kernel of one pixel."""
    kernel = weight.shape[2:]
    if all(size == 1 for size in kernel) and all(step == 1 for step in stride) and not any(padding):
        return 0
    return int(x.shape[0]) * math.prod(weight.shape[1:]) * math.prod(made.shape[2:]) * x.itemsize


def _unfolded_forward_bytes(x: torch.Tensor, out: torch.Tensor, columns: int, groups: int) -> int:
    """Patches beside the result; of several groups each is cut out and computed alone, and all are joined at last."""
    return columns if groups == 1 else max(_nbytes(x) // groups + columns, _nbytes(out))


def _unfolded_backward_bytes(
    grad: torch.Tensor, x: torch.Tensor, out: Sequence[torch.Tensor | None], columns: int, groups: int
) -> int:
    """The weight's gradient takes the patches again."""
    columns = columns if out[1] is not None else 0
    joined = sum(_nbytes(made) for made in out[:2] if made is not None)
    return columns if groups == 1 else max((_nbytes(x) + _nbytes(grad)) // groups + columns, joined)


def _reorders(
    x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], dilation: Sequence[int], transposed: bool, groups: int
) -> bool:
    """Whether oneDNN runs this convolution, in a layout other than its tensors' (`use_mkldnn` in Convolution.cpp)."""
    if x.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return False
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        return False
    kernel = weight.shape[2:]
    pointwise = all(size == 1 for size in kernel) and not any(step != 1 for step in (*stride, *dilation))
    if pointwise and x.shape[0] < 16 and torch.get_num_threads() == 1 and not transposed:
        return False
    return groups > 1 or all(size > 3 for size in kernel) or x.shape[0] > 1 or x.numel() > 20480


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize
