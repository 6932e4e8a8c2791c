"""Steps observed under a loss scale, as the precision of a rewritten module asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from rewrite.observation import Observation, observe
from rewrite.precision import DYNAMIC, Precision

FIRST_SCALE = 2.0**16
BACKOFF = 2.0**2


class Scaling:
    """Observes steps under the loss scale of a precision.

    A dynamic one begins at 2**16, as `torch.amp.GradScaler` does, and falls until no gradient overflows.
    """

    def __init__(self, precision: Precision | None) -> None:
        scale = 1.0 if precision is None else precision.loss_scale
        self.dynamic = scale == DYNAMIC
        self.scale = FIRST_SCALE if self.dynamic else float(scale)

    def observe(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, seed: int, train: bool
    ) -> Observation:
        """`observe`, repeated while a smaller scale may help."""
        while True:
            found = observe(module, args, kwargs, seed=seed, train=train, scale=self.scale)
            gradients = (gradient for gradient in found.gradients.values() if gradient is not None)
            if not self.dynamic or self.scale <= 1 or all(bool(each.isfinite().all()) for each in gradients):
                return found
            self.scale /= BACKOFF
