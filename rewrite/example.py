"""The call that a program was captured from, for as long as passes look at it."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass
class Example:
    """One call of a model, and how a step with it is to be counted; `program.metadata["example"]`.

    It holds the user's own tensors, so it is emptied when the passes are through.
    """

    root: nn.Module | None
    """None where the program is not that of a training step of the whole model, but of another kind of call."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    optimizer: str | None = None
    """Whose state counts in a step; see `rewrite.estimate`."""
    device: str | None = None
    """Which device's kernels count: "cpu" or "cuda"."""
    found: dict[Hashable, Any] = field(default_factory=dict)
    """What planning has found of programs of this call, by what it depends on, so that it is found once."""

    settled: dict[Hashable, Any] = field(default_factory=dict)
    """Plans made for earlier calls of the model, which hold for equal ones."""

    def inputs(self) -> Any:
        """The call as example inputs: positional ones by name where there are both."""
        if not self.kwargs or not self.args:
            return self.args if self.args else dict(self.kwargs or {})
        assert self.root is not None
        return dict(inspect.signature(self.root.forward).bind(*self.args, **self.kwargs).arguments)

    def release(self) -> None:
        """Let go of the model and the inputs."""
        self.root, self.args, self.kwargs = None, (), None
        self.found.clear()
