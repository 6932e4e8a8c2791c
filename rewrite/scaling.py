"""Training and saving as the precision of a rewritten model asks for it: loss scaling, fp32 weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rewrite.emit.forward import RegionForward
from rewrite.emit.low_weights import LOW, hold
from rewrite.errors import ModelError
from rewrite.precision import DYNAMIC, Precision


def loss_scaler(model: nn.Module, **options: Any) -> torch.amp.GradScaler:
    """A `torch.amp.GradScaler` for a model that `rewrite.optimize` returned, set up by its precision.

    A dynamic scale starts at 2**16, is halved, and the step skipped, when a gradient overflows, and doubles after
    2000 clean steps, as torch and apex have it; `options` are those of GradScaler, to have it otherwise. A number is
    kept as it is: an overflow skips the step and no more. With a scale of 1 the scaler is disabled and passes
    everything through. Call `scaler.scale(loss).backward()`, `scaler.unscale_(optimizer)` before clipping,
    `scaler.step(optimizer)` and `scaler.update()`; `state_dict()` and `load_state_dict()` resume it.

    Raises ModelError for a model that was not made by `optimize`.
    """
    precision = precision_of(model)
    scale = 1.0 if precision is None else precision.loss_scale
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if scale == DYNAMIC:
        return torch.amp.GradScaler(device, **options)
    if float(scale) == 1.0:
        return torch.amp.GradScaler(device, **{"enabled": False, **options})
    return StaticScaler(device, **{"init_scale": float(scale), **options})


class StaticScaler(torch.amp.GradScaler):
    """A scaler whose scale never changes."""

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """End a step: what was found in its gradients is forgotten, and the scale kept unless one is given."""
        super().update(self.get_scale() if new_scale is None else new_scale)


def precision_of(model: nn.Module) -> Precision | None:
    """What the passes of a rewritten model decided; None when they cast nothing. Raises ModelError."""
    present = (vars(module).get("forward") for module in model.modules())
    forward = next((each for each in present if isinstance(each, RegionForward)), None)
    if forward is None:
        raise ModelError("model", "it was not made by rewrite.optimize", "call this on what optimize returned")
    return forward.rewriting.precision


@contextlib.contextmanager
def full_precision(model: nn.Module) -> Iterator[nn.Module]:
    """Within the block, half-precision parameters and saved buffers of `model` are held in fp32, tied ones as one.

    For saving a model whose weights are half: `with rewrite.full_precision(model): model.save_pretrained(folder)`.
    """
    restore = hold(model, LOW, torch.float32)
    try:
        yield model
    finally:
        restore()
