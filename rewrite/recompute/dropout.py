"""Dropout whose mask is kept as one byte an element, bit-equal to torch's own on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mask:
    """Which elements a dropout let through, and the factor it scaled them by."""

    passed: torch.Tensor
    """bool, the shape of the dropout's input."""
    probability: float
    dtype: torch.dtype

    def expand(self) -> torch.Tensor:
        """The factor of each element, as the dropout's backward multiplies by."""
        passed = self.passed.view(torch.uint8)  # whose conversion a CPU vectorizes, which that of bool it does not
        return passed.to(self.dtype).div_(1 - self.probability)

    def applied(self, value: torch.Tensor) -> torch.Tensor:
        """The dropout of `value`."""
        if 1 in value.shape:  # the strides of such a dimension would be the factors', and not those of a product
            return value * self.expand()
        return self.expand().mul_(value)  # where the factors are: a new tensor costs a CPU more than the product


def draws_a_mask(value: torch.Tensor, probability: float, training: bool) -> bool:
    """Whether torch's dropout of `value` multiplies by a mask of its dtype (CPU, ATen/native/Dropout.cpp)."""
    plain = value.device.type == "cpu" and value.is_floating_point() and value.numel() > 0
    return training and plain and 0 < probability < 1


def draw(value: torch.Tensor, probability: float) -> torch.Tensor:
    """The factors that torch's dropout multiplies `value` by: the same random numbers, in the same order."""
    with torch.no_grad():
        return torch.empty_like(value).bernoulli_(1 - probability).div_(1 - probability)


def mask_of(factors: torch.Tensor, probability: float) -> Mask:
    """What `draw` gave, at one byte an element."""
    return Mask(factors.bool(), probability, factors.dtype)
