"""A forward that is told by a script: a few comparisons for each tensor that is saved, in the place of the books.

Where an operator saves what the script does not have, the tensor is kept: right, and larger. Forwards of this kind have
no script from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rewrite.recompute.demand import Run
from rewrite.recompute.plan import Place
from rewrite.recompute.recording import Recording
from rewrite.recompute.script import KEPT, OWN, VALUE, WEIGHT, Script
from rewrite.recompute.tensors import detached, is_weight
from rewrite.recompute.tokens import WHOLE, Kept, Saved, Token


class Followed(Recording):
    """What is known in the forward of a segment, as the script has it.

    A value is known by its address: while it is alive nothing else has it, and alive it is wherever the script has it
    saved, as it is read there. That what is saved comes from the node the script says is checked when the node ends.
    """

    def __init__(self, run: Run, inputs: Sequence[Any], script: Script) -> None:
        self.script = script
        self.entries = script.entries
        self.addresses = [0] * len(script.entries)
        """Of each value by slot; 0 for one that has not been made."""
        self.astray = False
        run.need_grad = script.need_grad
        super().__init__(run, inputs)

    def given(self, place: Place, value: Any) -> None:
        if place in self.held:
            self.sources[place] = detached(value)

    hold = given

    def know(self, value: torch.Tensor) -> None:
        """Told by the script."""

    def gone(self, *places: Place) -> None:
        """Told by the script."""

    def made(self, place: Place, value: Any, *gone: Place) -> None:
        if self.pending:
            self._settle(place, value)
        ends = self.ends
        saved, told = self.script.ends[len(ends)]
        ends.append(len(self.tokens))
        self.since = self.saved
        if saved != self.saved:
            self._stray()
        for part, slot in told:
            self.addresses[slot] = (value if part == WHOLE else value[part]).data_ptr()
        if place in self.held:
            self.sources[place] = detached(value)

    def pack(self, tensor: torch.Tensor) -> Token | Kept:
        number = self.saved
        self.saved = number + 1
        if number < len(self.entries):
            kind, saved, slot, ahead, size, stride, dtype = self.entries[number]
            if kind == WEIGHT:
                if type(tensor) is nn.Parameter or is_weight(tensor):
                    return (tensor, tensor._version, self.plan)
            elif kind == VALUE:
                start = self.addresses[slot]
                if (
                    start
                    and tensor.data_ptr() == start + ahead
                    and tensor.size() == size
                    and tensor.stride() == stride
                    and tensor.dtype is dtype
                    and type(tensor) is torch.Tensor
                ):
                    token = Token(self.run, saved, None)
                    self.tokens.append(token)
                    return token
            elif kind == KEPT:
                return (tensor.detach(), tensor._version, self.plan)
            elif kind == OWN:
                kept = (tensor.detach(), tensor._version, self.plan)
                token = Token(self.run, Saved(0, WHOLE, number - self.since, None), kept)
                self.pending.append(token)
                return token
        self._stray()
        return (tensor if is_weight(tensor) else tensor.detach(), tensor._version, self.plan)

    def _stray(self) -> None:
        self.astray, self.entries = True, ()
        for kind, script in [*self.plan.scripts.items()]:
            if script is self.script:
                self.plan.scripts[kind] = None

    def finish(self) -> None:
        tokens, script = self.left(), self.script
        course = script.course if tokens == script.tokens else self.plan.course(tokens)
        self.run.holds(self.tokens, course, self.sources)
