"""Loss scaling as the precision of a rewritten model asks for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rewrite.emit.forward import RegionForward
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


def full_precision_state(model: nn.Module) -> dict[str, Any]:
    """The state dict with every half-precision tensor widened to fp32, tied ones still one tensor.

    For `model.save_pretrained(folder, state_dict=rewrite.full_precision_state(model))` of a model whose parameters
    are held in half.
    """
    wide: dict[int, torch.Tensor] = {}
    found: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
            value = wide.setdefault(id(value), value.detach().float())
        found[name] = value.detach() if isinstance(value, torch.Tensor) else value
    return found
