"""Run a segment so that autograd holds tokens in place of its values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from rewrite.recompute import dropout
from rewrite.recompute.demand import Run
from rewrite.recompute.plan import Place
from rewrite.recompute.replay import random_state
from rewrite.recompute.tokens import Kept, Token, unpack


def run_recorded(forward: Forward, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The results of the segment; the backward computes its values again as the plan says."""
    try:
        with saved_tensors_hooks(forward.pack, unpack):
            results = forward.plan.recorded(forward.module, forward, *inputs)
        forward.finish()
    finally:
        forward.forget()  # after an error too: values hold, through their graphs, tokens, and autograd the hooks
    return results


class Forward(ABC):
    """What is known in the forward of a segment; how it is told what a saved tensor is, its kinds say."""

    def __init__(self, run: Run) -> None:
        self.run = run
        """What tokens are cashed at."""
        self.plan, self.module = run.plan, run.module
        self.held = run.plan.held
        self.pending: list[Token] = []
        """Tokens for tensors that are not known: the operator that runs has made them."""
        self.tokens: list[Token] = []
        """Those for what is dropped."""
        self.sources: dict[Place, Any] = {}
        """Inputs, kept values, numbers, masks and states of generators; given to the tokens at the end."""

    @abstractmethod
    def pack(self, tensor: torch.Tensor) -> Token | Kept:
        """What autograd is to hold for a tensor that an operator saves."""

    @abstractmethod
    def finish(self) -> None:
        """The forward is through: tokens hold what they can be had from."""

    def draws(self, place: Place) -> None:
        """The node at `place` is about to draw random numbers."""
        self.sources[~place] = random_state(self.run.devices)

    def dropout(
        self, place: Place, value: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        """Dropout of which the mask is kept, or the generator's state where torch draws no mask as a tensor."""
        if not dropout.draws_a_mask(value, p, training):
            self.draws(place)
            return torch.nn.functional.dropout(value, p, training)
        factors = dropout.draw(value, p)
        result = value * factors
        mask = self.sources[~place] = dropout.mask_of(factors, p)
        storage = factors.untyped_storage()._cdata
        for token in self.pending:
            if tensor_of(token).untyped_storage()._cdata == storage:
                token.kept = mask
        self.pending = [token for token in self.pending if token.kept is not mask]
        return result

    def dropout_module(self, place: Place, module: nn.Dropout, value: torch.Tensor) -> Any:
        """The same for a layer."""
        return self.dropout(place, value, module.p, module.training)

    def forget(self) -> None:
        """Hold nothing any more but what tokens hold."""
        self.sources, self.tokens, self.pending = {}, [], []


def tensor_of(token: Token) -> torch.Tensor:
    """What a token holds that is not settled."""
    return token.kept[0]  # type: ignore[index]
