"""A recompute segment as a call in a graph: which way its values are had again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rewrite.recompute import nesting
from rewrite.recompute.demand import Run
from rewrite.recompute.followed import Followed
from rewrite.recompute.forward import Forward, run_recorded
from rewrite.recompute.passing import Passage, Passing
from rewrite.recompute.plan import Plan
from rewrite.recompute.recording import Recording
from rewrite.recompute.script import Learner, kind_of
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
        return run_recorded(self._recording(module, inputs), inputs)

    def _recording(self, module: nn.Module, inputs: tuple[Any, ...]) -> Forward:
        if self.plan.passing:
            return Passage(Passing(self.plan, module, inputs), inputs)
        run = Run(self.plan, module, inputs)
        kind = None if self.plan.by_data or nesting.holder() is not None else kind_of(inputs)
        if kind is None:
            return Recording(run, inputs)
        if kind not in self.plan.scripts:
            return Recording(run, inputs, Learner(kind))
        script = self.plan.scripts[kind]
        return Recording(run, inputs) if script is None else Followed(run, inputs, script)
