"""How far two results may lie apart, by the numerics that a rewrite declares.

`EXACT` allows nothing. The others are bounds on the largest difference, relative to the largest magnitude of the
value compared:

- `REASSOCIATED`: summing n terms in another order moves a sum by at most (n - 1) u times the sum of the magnitudes
  (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2, with gamma_n of section 3.1); when
  rounding errors are independent n gives way to sqrt(n), the rule of thumb of section 2.8. L such sums in a chain add
  up likewise, so the bound is 4 sqrt(n L) u.
- `REDUCED`: a product rounds two operands and its result to the low precision and sums in single, so each layer of a
  chain of L adds three roundings: 4 sqrt(3 L) u, with the low precision's u.

u is the unit roundoff, half of `torch.finfo(dtype).eps`; 4 is the margin for the largest of many errors. A value
that is small because large terms cancel carries the rounding of those terms, so each bound adds u times the
largest magnitude of its kind.

The bound of `REDUCED` needs nothing but the model's shape, and holds for smooth models. `verify` measures how far
rounding moves the model at hand instead: see `rewrite/sensitivity.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from rewrite.contract import Numerics

MARGIN = 4.0


@dataclass(frozen=True)
class Tolerance:
    """Bounds for one module and one batch."""

    numerics: Numerics
    terms: int
    """Longest sum: the largest of the parameters' dimensions and the inputs' element counts."""
    layers: int
    """Length of the chain: how many modules hold parameters."""
    low: torch.dtype

    def bound(self, value: torch.Tensor, largest: float) -> float:
        """The largest difference allowed from `value`; `largest` is the largest magnitude of its kind in the step."""
        if self.numerics is Numerics.EXACT or not value.is_floating_point():
            return 0.0
        reduced = self.numerics is Numerics.REDUCED
        roundoff = max(torch.finfo(value.dtype).eps, torch.finfo(self.low).eps if reduced else 0.0) / 2
        roundings = (3 if reduced else self.terms) * self.layers
        return MARGIN * math.sqrt(roundings) * roundoff * magnitude(value) + roundoff * largest


def tolerance_for(module: nn.Module, inputs: Iterable[torch.Tensor], numerics: Numerics, low: torch.dtype) -> Tolerance:
    """The tolerance of `module` under `inputs`; `low` is the precision that `REDUCED` computes in."""
    dimensions = [size for parameter in module.parameters() for size in parameter.shape]
    counts = [tensor.numel() for tensor in inputs]
    layers = sum(1 for part in module.modules() if part._parameters)
    return Tolerance(numerics, max([1, *dimensions, *counts]), max(layers, 1), low)


def magnitude(value: torch.Tensor) -> float:
    """The largest finite magnitude of `value`; 0 for an empty one."""
    if value.numel() == 0:
        return 0.0
    return float(value.detach().double().abs().nan_to_num(0.0, 0.0, 0.0).max())
