"""Peak rates of a few devices: what the roofline divides by."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Peak rates, per second."""

    flops: float
    """Single precision, as torch computes it by default."""
    half_flops: float
    """float16 and bfloat16, dense."""
    bytes: float
    """Memory traffic."""
    source: str
    attention: float = 1.0
    """Of the rate of matrix products, the share that attention in one kernel reaches."""
    draws: float = math.inf
    """Random numbers, where drawing them takes longer than writing them."""
    launch: float = 5e-6
    """Seconds that an operator takes however small it is, to be called from Python."""
    beside: float = 0.0
    """Seconds that an operator of a training step takes beside its work, where nothing else runs meanwhile."""


PEAK_RATES = {
    "h100": Rates(67e12, 989e12, 3.35e12, "NVIDIA H100 datasheet, SXM5, without sparsity"),
    "a100": Rates(19.5e12, 312e12, 2.039e12, "NVIDIA A100 datasheet, 80GB SXM, without sparsity"),
    "rtx4090": Rates(82.6e12, 165.2e12, 1.008e12, "NVIDIA Ada GPU architecture whitepaper, FP16 with FP32 accumulate"),
    "rtx3090": Rates(35.6e12, 71e12, 0.936e12, "NVIDIA Ampere GA102 whitepaper, FP16 with FP32 accumulate, dense"),
    "l4": Rates(30.3e12, 121e12, 0.3e12, "NVIDIA L4 datasheet, without sparsity"),
    "a10": Rates(31.2e12, 125e12, 0.6e12, "NVIDIA A10 datasheet, without sparsity"),
    "t4": Rates(8.1e12, 65e12, 0.32e12, "NVIDIA T4 datasheet"),
    "cpu": Rates(
        100e9,
        100e9,
        20e9,
        "a nominal server core, as tests/bench/core_rates.py measures one",
        attention=0.7,
        draws=125e6,
        launch=2e-6,
        beside=20e-6,
    ),
}
