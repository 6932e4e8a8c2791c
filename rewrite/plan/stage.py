"""Where planning runs parts of a model: on fake CPU tensors, with the operators counted and nothing allocated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rewrite.capture.answers import Answers
from rewrite.memory.autograd import lone_holders
from rewrite.memory.devices import kernels_of
from rewrite.memory.fakes import FakeTensors, same_random_state, swapped
from rewrite.memory.place import ModulePaths, Places
from rewrite.memory.questions import Questions
from rewrite.memory.quick import QuickFakes
from rewrite.memory.tracker import Tracker
from rewrite.memory.work import Tally


class Stage:
    """A module tree whose tensors are fakes, for as long as `staged` is open."""

    def __init__(self, root: nn.Module, quick: QuickFakes, device: str) -> None:
        self.root = root
        self.device = device
        self._modules = ModulePaths(root)
        self._quick = quick

    def tracker(self, tally: Tally) -> Tracker:
        """A dispatch mode that follows storages and counts work, for one run."""
        questions = Questions(Answers({}), self._modules, self._quick)
        return Tracker(Places(self._modules), questions, tally, cpu_kernels=self.device == "cpu")


@contextlib.contextmanager
def staged(root: nn.Module, device: str = "cpu") -> Iterator[Stage]:
    """Within the block the tree's tensors are fakes that behave as on `device`; afterwards all is as it was."""
    lone_holders()  # found once, outside the modes
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.ExitStack() as around:
        around.enter_context(same_random_state())
        around.enter_context(mode)
        quick = QuickFakes(mode)
        around.enter_context(swapped(root, FakeTensors(quick)))
        around.enter_context(kernels_of(device))
        yield Stage(root, quick, device)


def example(value: Any) -> Any:
    """A value as capture described it, with the sizes of the example: tensors anew, numbers as they were.

    What holds tensors in an object of its own becomes None.
    """
    if isinstance(value, torch.Tensor):
        return tensor_like(value, [size_of(size) for size in value.shape], [size_of(step) for step in value.stride()])
    if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
        return size_of(value)
    if type(value) in (tuple, list):
        return type(value)(example(item) for item in value)
    return value if isinstance(value, (bool, float, str)) else None


def tensor_like(value: torch.Tensor, shape: list[int], stride: list[int]) -> torch.Tensor:
    """A tensor of its own with this geometry, of the dtype of `value`; a leaf that needs a gradient if `value` does."""
    made = torch.empty_strided(shape, stride, dtype=value.dtype)
    return made.requires_grad_() if value.requires_grad else made


def size_of(size: Any) -> int:
    """A size, or what it was for the example inputs."""
    hint = getattr(getattr(size, "node", None), "hint", size)
    return int(hint) if hint is not None else 1
