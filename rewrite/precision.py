"""The precision a pass has a model compute in, as the rest of the toolkit needs to know it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

DYNAMIC = "dynamic"


@dataclass(frozen=True)
class Precision:
    """What a pass that casts decides for the whole model."""

    dtype: str
    """The low precision: "float16" or "bfloat16"."""
    loss_scale: float | str = 1.0
    """What losses are multiplied by before the backward: a number, or "dynamic"."""
    low_weights: bool = False
    """Whether the parameters themselves are held in it, rather than cast for the computation."""
