"""Linear layers whose frozen weights are stored in 8 or 4 bits, as bitsandbytes stores them.

They are the classes of bitsandbytes, so that peft and transformers know them, with a forward of their own. The stock
forward keeps what it needs on the side: scales as attributes of the weight, which a swap of tensors loses; in 8 bits
on CPU the whole input, which no saved-tensor hook sees, so that a recompute cannot drop it; and it rounds activations
to 8 bits in eval mode alone. Here the scales are buffers, the weight is brought back to the input's precision for the
product, and again for its backward, and nothing of the input is kept: a frozen weight needs none of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState, get_4bit_type, quantize_4bit
from torch import nn

BLOCK = 64
"""Elements that share a scale in 4 bits, as in QLoRA (Dettmers et al., 2023)."""
NORMAL_FLOAT = "nf4"
"""The 4-bit type: quantiles of a normal distribution."""
INT8_RANGE = 127.0
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What the kernels of bitsandbytes for 4 bits take and give; they write others as if they were float32."""

Dequantize = Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
"""(stored weight, scales, dtype) -> the weight, out features x in features."""


class FrozenProduct(torch.autograd.Function):
    """x @ W^T + b for a weight that is stored in low precision and needs no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        stored: torch.Tensor,
        scales: torch.Tensor,
        dequantize: Dequantize,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.dequantize, ctx.dtypes = dequantize, (x.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(stored, scales)
        with _as_given(x):
            weight = dequantize(stored, scales, dtype)
            return nn.functional.linear(x.to(dtype), weight, None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        stored, scales = ctx.saved_tensors
        dtype, bias_dtype = ctx.dtypes
        to_x = to_bias = None
        with _as_given(grad):
            if ctx.needs_input_grad[0]:
                to_x = (grad @ ctx.dequantize(stored, scales, grad.dtype)).to(dtype)
            if ctx.needs_input_grad[1]:
                to_bias = grad.sum(tuple(range(grad.ndim - 1)), dtype=bias_dtype)
        return to_x, to_bias, None, None, None, None


def frozen_product(
    x: torch.Tensor, bias: torch.Tensor | None, stored: torch.Tensor, scales: torch.Tensor, dequantize: Dequantize
) -> torch.Tensor:
    """`FrozenProduct` in the dtype of `x`, or of autocast."""
    made = FrozenProduct.apply(x, bias, stored, scales, dequantize, compute_dtype(x))  # type: ignore[no-untyped-call]
    result: torch.Tensor = made
    return result


def _as_given(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """No autocast on the device of `x`."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else contextlib.nullcontext()


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """What a product of `x` is computed in: the dtype of autocast where that is on."""
    kind = x.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if casts else x.dtype


def from_rows(stored: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int8 with the largest magnitude of each row -> the weight."""
    return stored.to(dtype).mul_((scales / INT8_RANGE).to(dtype).unsqueeze(1))


def to_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight -> int8 of its shape, and the largest magnitude of each row in float32."""
    wide = weight.detach().float()
    scales = wide.abs().amax(1)
    return torch.round(wide * (INT8_RANGE / scales.clamp_min(1e-38)).unsqueeze(1)).to(torch.int8), scales


class Linear8bitLt(bnb.nn.Linear8bitLt):
    """A Linear with a frozen int8 weight, and a scale for each row of it in the buffer `SCB`."""

    stored_bits = 8
    stored_from: torch.dtype
    SCB: torch.Tensor
    index = None

    @classmethod
    def of(cls, linear: nn.Linear) -> Linear8bitLt:
        """A layer in the place of `linear`, with its bias, hooks and attributes; `linear` stays as it is."""
        made: Linear8bitLt = _in_place_of(linear, cls)
        made.register_buffer("SCB", None)
        made.store(*to_rows(linear.weight))
        return made

    def store(self, stored: torch.Tensor, scales: torch.Tensor) -> None:
        """Take a weight in int8 and its scales."""
        self.weight = bnb.nn.Int8Params(stored, requires_grad=False, has_fp16_weights=False)
        self.SCB = scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = getattr(self.weight, "SCB", None)
        if given is not None:  # a weight that peft has merged an adapter into, and quantized
            self.store(self.weight.data, given)
        return frozen_product(x, self.bias, self.weight, self.SCB, from_rows)

    def dequantized(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight that the layer computes with, in the dtype it was stored from."""
        return from_rows(self.weight.data.as_subclass(torch.Tensor), self.SCB, dtype or self.stored_from)

    def reference(self) -> nn.Linear:
        """An ordinary layer that computes the same."""
        return _ordinary(self)

    @property
    def state(self) -> bnb.MatmulLtState:  # type: ignore[override]
        """What bitsandbytes and peft read of such a layer; made anew, so that it cannot be out of date."""
        made = bnb.MatmulLtState()
        made.CB, made.SCB, made.has_fp16_weights = self.weight.data, self.SCB, False
        return made

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return nn.Module.to(self, *args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        weight, scales = self._parameters["weight"], self._buffers["SCB"]
        self._parameters["weight"] = self._buffers["SCB"] = None
        nn.Module._apply(self, fn, recurse)
        self.store(fn(_plain(weight)), _bytewise(fn, scales))
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self.store(_plain(self.weight), self.SCB)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        state_dict.pop(f"{prefix}weight_format", None)
        if weight is not None and weight.is_floating_point():
            state_dict[f"{prefix}weight"], state_dict[f"{prefix}SCB"] = to_rows(weight)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)
        if type(self.weight) is not bnb.nn.Int8Params:
            self.store(_plain(self.weight), self.SCB)


class Linear4bit(bnb.nn.Linear4bit):
    """A Linear with a frozen weight of 4-bit normal floats, two a byte, and a scale for each 64 in `absmax`."""

    stored_bits = 4
    stored_from: torch.dtype
    absmax: torch.Tensor
    compute_dtype = None

    @classmethod
    def of(cls, linear: nn.Linear) -> Linear4bit:
        """A layer in the place of `linear`, with its bias, hooks and attributes; `linear` stays as it is."""
        made: Linear4bit = _in_place_of(linear, cls)
        made.register_buffer("absmax", None, persistent=False)  # bitsandbytes saves it below the weight
        made.store(*made.packed(linear.weight))
        return made

    def packed(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The weight -> bytes of two elements each, and the scales of the blocks in float32."""
        if weight.is_meta:
            elements = weight.numel()
            stored = torch.empty(-(-elements // 2), 1, dtype=torch.uint8, device="meta")
            return stored, torch.empty(-(-elements // BLOCK), device="meta")
        stored, state = quantize_4bit(
            weight.detach().to(_kernel_dtype(weight.dtype)).contiguous(),
            blocksize=BLOCK,
            compress_statistics=False,
            quant_type=NORMAL_FLOAT,
        )
        return stored, state.absmax

    def store(self, stored: torch.Tensor, scales: torch.Tensor) -> None:
        """Take the bytes of a weight and the scales of its blocks."""
        self.absmax = scales
        self.weight = bnb.nn.Params4bit(
            stored, requires_grad=False, quant_state=self.state_of(scales), blocksize=BLOCK, compress_statistics=False,
            quant_type=NORMAL_FLOAT, bnb_quantized=True,
        )  # fmt: skip

    def state_of(self, scales: torch.Tensor) -> QuantState:
        """What bitsandbytes and peft read of such a weight, with these scales in it."""
        return QuantState(
            scales,
            shape=torch.Size((self.out_features, self.in_features)),
            code=get_4bit_type(NORMAL_FLOAT, device="cpu"),
            blocksize=BLOCK,
            quant_type=NORMAL_FLOAT,
            dtype=_kernel_dtype(self.stored_from),
        )

    @property
    def quant_state(self) -> QuantState:  # type: ignore[override]
        """As the weight has it."""
        return self.state_of(self.absmax)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return frozen_product(x, self.bias, self.weight, self.absmax, self._unpacked)

    def _unpacked(self, stored: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        shape = (self.out_features, self.in_features)
        plain = stored.as_subclass(torch.Tensor) if type(stored) is bnb.nn.Params4bit else stored
        weight: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            plain, scales, BLOCK, NORMAL_FLOAT, shape, _kernel_dtype(dtype)
        )
        return weight.to(dtype)

    def dequantized(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight that the layer computes with, in the dtype it was stored from."""
        return self._unpacked(_plain(self.weight), self.absmax, dtype or self.stored_from)

    def reference(self) -> nn.Linear:
        """An ordinary layer that computes the same."""
        return _ordinary(self)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        weight, scales = self._parameters["weight"], self._buffers["absmax"]
        self._parameters["weight"] = self._buffers["absmax"] = None
        nn.Module._apply(self, fn, recurse)
        self.store(fn(_plain(weight)), _bytewise(fn, scales))
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self.store(_plain(self.weight), self.absmax)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        weight = state_dict.get(f"{prefix}weight")
        below = [key for key in state_dict if key.startswith(f"{prefix}weight.")]
        given = {key: state_dict.pop(key) for key in below}
        scales = given.get(f"{prefix}weight.absmax")
        if weight is not None and weight.is_floating_point():
            state_dict[f"{prefix}weight"], scales = self.packed(weight)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)
        if scales is not None:
            self.store(_plain(self.weight), scales.to(self.absmax))


def _ordinary(layer: Linear8bitLt | Linear4bit) -> nn.Linear:
    """A Linear with the weight that `layer` computes with, and its bias."""
    made = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    made.weight = nn.Parameter(layer.dequantized(), requires_grad=False)
    made.register_parameter("bias", layer.bias)
    return made.train(layer.training)


def _in_place_of(linear: nn.Linear, kind: type[Any]) -> Any:
    made = object.__new__(kind)
    vars(made).update({name: dict(value) if type(value) is dict else value for name, value in vars(linear).items()})
    made.stored_from = linear.weight.dtype
    made._parameters["weight"] = None
    return made


def _bytewise(fn: Callable[[torch.Tensor], torch.Tensor], scales: torch.Tensor | None) -> torch.Tensor:
    """`fn` on scales as if they were bytes: it moves them, and leaves them in float32."""
    assert scales is not None
    return fn(scales.view(torch.uint8)).view(scales.dtype)


def _kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in KERNEL_DTYPES else torch.float32


def _plain(weight: torch.Tensor | None) -> torch.Tensor:
    assert weight is not None
    return weight.detach().as_subclass(torch.Tensor)


CLASSES: dict[int, type[Linear8bitLt] | type[Linear4bit]] = {8: Linear8bitLt, 4: Linear4bit}
