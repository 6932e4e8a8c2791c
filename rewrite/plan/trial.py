"""A program made into a module that runs, to be measured; the model it is of stays as it was."""

from __future__ import annotations

from torch import nn

from rewrite.emit.forward import RegionForward
from rewrite.emit.rewriting import Rewriting
from rewrite.emit.tree import copy_tree
from rewrite.example import Example
from rewrite.memory.measure import estimate_step
from rewrite.memory.timeline import Estimate
from rewrite.program import Program


def try_program(program: Program, example: Example) -> Estimate:
    """The memory of one training step of `program`, measured on fakes."""
    assert example.root is not None
    rewriting = Rewriting(_plain_copy(example.root), (), {})
    rewriting.emit(program)
    return estimate_step(rewriting.root, example.inputs(), optimizer=example.optimizer, device=example.device)


def _plain_copy(root: nn.Module) -> nn.Module:
    """A copy of the tree without what an earlier emission has put on it."""
    copied = copy_tree(root)
    for module in copied.modules():
        forward = vars(module).get("forward")
        if not isinstance(forward, RegionForward):
            continue
        vars(module).pop("forward")
        vars(module).pop("_replicate_for_data_parallel", None)
        if forward.given is not None:
            vars(module)["forward"] = forward.given
    return copied
