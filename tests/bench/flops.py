"""Operations of a step, by torch's own counter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    _FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

aten = torch.ops.aten

ON_CPU: dict[object, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(*shapes[:3]),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4])
    ),
}
"""The counter knows attention on GPUs only; the same formulas serve the CPU's."""


class _Inside(_FlopCounterMode):
    """Counts in compiled code too, which would run uncompiled under the counter otherwise."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def step_flops(step: Callable[[], object]) -> int:
    """Matrix products, convolutions and attention of `step`, recompute included; two for a multiply-add."""
    counter = FlopCounterMode(display=False, custom_mapping=ON_CPU)
    with _Inside(counter):  # not `with counter`: its hooks on modules show in compiled code
        step()
    return int(counter.get_total_flops())
