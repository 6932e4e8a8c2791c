"""A recompute segment as a call in a graph: which way its values are had again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rewrite.recompute import nesting
from rewrite.recompute.demand import Run, run_planned
from rewrite.recompute.passing import Passing
from rewrite.recompute.plan import Plan
from rewrite.recompute.whole import Recomputed


@dataclass(frozen=True)
class Planned:
    """A segment in a graph: runs as it is, or so that its values are recomputed."""

    plan: Plan
    whole: Recomputed
    """The same for a run within a segment that is recomputed whole."""

    def __call__(self, module: nn.Module, *inputs: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return self.plan.forward(module, *inputs)
        if nesting.within_whole():
            return self.whole(module, *inputs)
        return run_planned((Passing if self.plan.passing else Run)(self.plan, module, inputs), inputs)
