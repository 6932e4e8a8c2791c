"""Stand-ins for the optimizers of bitsandbytes: the state they keep and what their step allocates, without them.

State after `init_state` in bitsandbytes/optim/optimizer.py: a byte an element and moment, a float32 `absmax` per block
of 256 elements, and one code book of 256 float32 a moment for all; 32 bits for small and named parameters. Steps after
bitsandbytes/backends/cpu/ops.py; the kernels for CUDA update in place and allocate nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from rewrite.optim.groups import state_bits
from rewrite.optim.kinds import Kind

BLOCK_ELEMENTS = 256
CODES = 256


class Blockwise:
    """An optimizer of bitsandbytes in its steady state."""

    def __init__(self, kind: Kind, parameters: Sequence[nn.Parameter], full: set[int], *, in_place: bool) -> None:
        """`full`: ids of parameters whose moments stay in 32 bits. `in_place`: whether a step allocates nothing."""
        self._family = kind.family
        self._moments = len(kind.keys)
        self._in_place = in_place
        self._bits = {id(p): 32 if kind.bits == 32 else state_bits(p, full) for p in parameters}
        self._parameters = list(parameters)
        self._state = {id(parameter): list(self._made(parameter)) for parameter in parameters}
        coded = [parameter for parameter in parameters if self._bits[id(parameter)] == 8]
        self._codes = [torch.zeros(CODES, device=parameter.device) for parameter in coded[:1] * self._moments]

    def step(self) -> None:
        """Allocate, and release, what a step of the CPU kernels does."""
        if self._in_place:
            return
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad)

    def state_tensors(self) -> Iterator[torch.Tensor]:
        for state in self._state.values():
            yield from state
        yield from self._codes

    def state_of(self, parameter: nn.Parameter) -> Iterator[torch.Tensor]:
        yield from self._state.get(id(parameter), ())

    def _made(self, parameter: nn.Parameter) -> Iterator[torch.Tensor]:
        bits = self._bits[id(parameter)]
        dtype = torch.float32 if bits == 32 else torch.uint8
        blocks = -(-parameter.numel() // BLOCK_ELEMENTS)
        for _ in range(self._moments):
            yield torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            if bits == 8:
                yield torch.zeros(blocks, dtype=torch.float32, device=parameter.device)

    def _update(self, parameter: nn.Parameter, grad: torch.Tensor) -> None:
        coded = self._bits[id(parameter)] == 8
        held = self._state[id(parameter)]
        moments = [torch.empty_like(moment, dtype=torch.float32) for moment in held[::2]] if coded else held
        wide = grad.float() * 1.0
        values = parameter.detach().float()
        update = self._direction(moments, wide, coded=coded)
        parameter.detach().copy_(values.add_(update))
        for moment in moments if coded else ():
            self._coded(moment)

    def _direction(self, moments: list[torch.Tensor], grad: torch.Tensor, *, coded: bool) -> torch.Tensor:
        """The update, by the temporaries each family's kernel makes on its way."""
        if self._family == "adam" and coded:
            return (moments[1].sqrt() / 1.0).add_(0.0)
        if self._family == "adam":
            return moments[0] / (moments[1].sqrt() + 1e-8)
        if self._family == "lion" and coded:
            return torch.sign(moments[0].mul(1.0) + grad.mul(1.0))
        if self._family == "lion":
            return moments[0].mul(1.0).add(grad).sign()
        return grad.add_(0.0)

    def _coded(self, moment: torch.Tensor) -> None:
        codes = torch.empty(moment.shape, dtype=torch.uint8, device=moment.device)
        scales = torch.empty(-(-moment.numel() // BLOCK_ELEMENTS), device=moment.device)
        del codes, scales
