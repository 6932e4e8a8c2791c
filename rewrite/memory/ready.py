"""Have a rewritten model's code for a training step ready before the step is run on fakes, where none can be made."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rewrite.emit.forward import RegionForward
from rewrite.inputs import as_call
from rewrite.memory.modes import in_mode


def make_ready(module: nn.Module, example_inputs: Any, *, train: bool) -> None:
    """Capture this kind of call, if `module` is rewritten and has no code for it yet, as the first real one would."""
    forward = vars(module).get("forward")
    if not isinstance(forward, RegionForward):
        return
    args, kwargs = as_call(example_inputs)
    with in_mode(module, train), torch.set_grad_enabled(train):
        forward.prepare(args, kwargs)
