"""What is measured: a model, one batch, and the places where a person would apply a method by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

SEED = 3
"""Of the random draws inside every step, so that all methods drop the same values."""


class UnavailableError(Exception):
    """A method that this model, or this installation, has no place for; its text says why."""


@dataclass(frozen=True)
class Head:
    """The end of a language model, taken apart for a loss that is computed chunk by chunk."""

    hidden: Callable[[], torch.Tensor]
    """Runs the model up to its head: (tokens, width)."""
    linear: nn.Linear
    targets: torch.Tensor
    """int64 (tokens,); -100 where there is none. The loss is the mean over the others."""


@dataclass
class Workload:
    """A model in training mode with its batch. Methods change it in place; `forward` is what a step runs."""

    model: nn.Module
    inputs: dict[str, Any]
    blocks: Sequence[nn.Module]
    """What a person would checkpoint one by one, in the order they run."""
    chained: bool = True
    """Each block takes the one tensor that the block before it returned."""
    feed_forwards: Sequence[tuple[nn.Module, str]] = ()
    """Position-wise parts over (batch, length, width): a module, and the name of the method that is one."""
    head: Head | None = None
    forward: Callable[[], torch.Tensor] = field(init=False)
    """Runs the forward and returns the loss, a scalar."""

    def __post_init__(self) -> None:
        self.model.train()
        self.run(self.model)

    def run(self, module: Callable[..., Any]) -> None:
        """Let a step call `module` in the place of the model."""
        self.forward = lambda: loss_of(module(**self.inputs))

    def step(self) -> torch.Tensor:
        """One training step without an optimizer; the loss. Gradients of the step before are dropped first."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(SEED)
        loss = self.forward()
        loss.backward()
        return loss.detach()

    def gradients(self) -> list[torch.Tensor]:
        """Of every parameter that has one, in the model's order."""
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def resident_bytes(self) -> int:
        """Parameters, buffers and the batch, each storage once: there before a step and after it."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [value for value in self.inputs.values() if isinstance(value, torch.Tensor)]
        storages = {tensor.untyped_storage() for tensor in tensors}
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def loss_of(output: Any) -> torch.Tensor:
    """The scalar to differentiate: the output itself, or its `loss`. The rest of the output is let go."""
    loss = output if isinstance(output, torch.Tensor) else output.loss
    assert isinstance(loss, torch.Tensor)
    assert loss.dim() == 0
    return loss
