"""Memory of a training step, measured by running it on fake tensors. The records need no torch; the run does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rewrite.memory.timeline import Estimate as Estimate

if TYPE_CHECKING:
    from rewrite.memory.measure import estimate_step as estimate_step

__all__ = ["Estimate", "estimate_step"]


def __getattr__(name: str) -> Any:
    if name != "estimate_step":
        raise AttributeError(name)
    from rewrite.memory.measure import estimate_step

    return estimate_step
