"""The optimizers a step can be measured with: their state, and what their step allocates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from rewrite.memory.blockwise import Blockwise
from rewrite.optim.groups import in_full, trainable
from rewrite.optim.kinds import KINDS, check_optimizer


class StepOptimizer(Protocol):
    """What a measured step needs of an optimizer."""

    def step(self) -> None:
        """Update the parameters from their gradients."""

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Everything that stays allocated between steps."""

    def state_of(self, parameter: nn.Parameter) -> Iterator[torch.Tensor]:
        """The part of it that is there for one parameter."""


def build_optimizer(name: str | None, module: nn.Module, device: str) -> StepOptimizer | None:
    """The optimizer in its steady state: one step has been taken, so its state is there. None for "none".

    It is what `rewrite.optimizer` gives for that name and no options. Raises InputError for an unknown name. Gradients
    are left as None.
    """
    check_optimizer(name)
    if name is None or name == "none":
        return None
    parameters = [parameter for _, parameter in trainable(module)]
    kind = KINDS[name]
    if kind.library == "bitsandbytes":
        return Blockwise(kind, parameters, in_full(module), in_place=device == "cuda")
    foreach = device == "cuda"  # torch.optim chooses foreach by itself for CUDA parameters, and the loop for CPU ones
    make = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[name]
    return _Torch(make(parameters, lr=1e-3, foreach=foreach), parameters)


class _Torch:
    """A torch optimizer after one step on gradients of zero."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        self._optimizer.step()

    def state_tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self._parameters:
            yield from self.state_of(parameter)

    def state_of(self, parameter: nn.Parameter) -> Iterator[torch.Tensor]:
        held = self._optimizer.state.get(parameter, {})
        yield from (value for value in held.values() if isinstance(value, torch.Tensor))
