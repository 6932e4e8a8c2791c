"""The optimizers a step can be measured with: their state, and what their step allocates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from rewrite.errors import InputError

OPTIMIZERS = ("adamw", "adamw8bit", "sgd", "none")


class StepOptimizer(Protocol):
    """What a measured step needs of an optimizer."""

    def step(self) -> None:
        """Update the parameters from their gradients."""

    def state_tensors(self) -> Iterator[torch.Tensor]:
        """Everything that stays allocated between steps."""


def build_optimizer(name: str | None, parameters: Sequence[nn.Parameter], device: str) -> StepOptimizer | None:
    """The optimizer in its steady state: one step has been taken, so its state is there. None for "none".

    Raises InputError for an unknown name. Gradients are left as None.
    """
    if name is None or name == "none":
        return None
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if name == "adamw8bit":
        return BlockwiseAdamW(trainable)
    foreach = device == "cuda"  # torch.optim chooses foreach by itself for CUDA parameters, and the loop for CPU ones
    if name == "adamw":
        return _Torch(torch.optim.AdamW(trainable, lr=1e-3, foreach=foreach), trainable)
    if name == "sgd":
        return _Torch(torch.optim.SGD(trainable, lr=1e-3, foreach=foreach), trainable)
    raise InputError(f"optimizer {name!r}", "it is not known", f"choose one of: {', '.join(OPTIMIZERS)}")


class _Torch:
    """A torch optimizer after one step on gradients of zero."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer = optimizer
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        self._optimizer.step()

    def state_tensors(self) -> Iterator[torch.Tensor]:
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


class BlockwiseAdamW:
    """The state of bitsandbytes' AdamW8bit; its fused kernel updates in place and allocates nothing.

    Layout after `Optimizer2State.init_state` in bitsandbytes/optim/optimizer.py: two moments of one byte an element,
    a float32 absmax per block of 256 each, and two code books of 256 float32 for all; a tensor of fewer than 4096
    elements (`min_8bit_size`) keeps both moments in float32.
    """

    BLOCK_ELEMENTS = 256
    SMALLEST = 4096

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._state: list[torch.Tensor] = []
        for parameter in parameters:
            self._state.extend(self._moments(parameter))
        if any(parameter.numel() >= self.SMALLEST for parameter in parameters):
            self._state.extend(torch.zeros(256, dtype=torch.float32, device=parameters[0].device) for _ in range(2))

    def step(self) -> None:
        """Nothing is allocated, so nothing is run."""

    def state_tensors(self) -> Iterator[torch.Tensor]:
        yield from self._state

    def _moments(self, parameter: nn.Parameter) -> list[torch.Tensor]:
        device = parameter.device
        if parameter.numel() < self.SMALLEST:
            return [torch.zeros(parameter.shape, dtype=torch.float32, device=device) for _ in range(2)]
        blocks = -(-parameter.numel() // self.BLOCK_ELEMENTS)
        moments = [torch.zeros(parameter.shape, dtype=torch.uint8, device=device) for _ in range(2)]
        return moments + [torch.zeros(blocks, dtype=torch.float32, device=device) for _ in range(2)]
