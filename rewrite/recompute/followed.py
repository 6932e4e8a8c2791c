"""A forward that is told by a script: a few comparisons for each tensor that is saved, in the place of the books.

Where an operator saves what the script does not have, the tensor is kept: right, and larger. Forwards of this kind have
no script from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rewrite.recompute.course import Course
from rewrite.recompute.demand import Run
from rewrite.recompute.forward import Forward, tensor_of
from rewrite.recompute.plan import Place
from rewrite.recompute.script import KEPT, OWN, VALUE, WEIGHT, Entry, Script
from rewrite.recompute.tensors import detached, is_weight
from rewrite.recompute.tokens import WHOLE, Kept, Token, unsettled


class Followed(Forward):
    """What is known in the forward of a segment, as the script has it.

    A value is known by its address: while it is alive nothing else has it, and alive it is wherever the script has it
    saved, as it is read there. That what is saved comes from the node the script says is checked when the node ends.
    """

    def __init__(self, run: Run, inputs: Sequence[Any], script: Script) -> None:
        super().__init__(run)
        self.script = script
        self.entries = script.entries
        self.addresses = [0] * len(script.entries)
        """Of each value by slot; 0 for one that has not been made."""
        self.astray = False
        run.need_grad, run.dropped_state = script.need_grad, script.dropped_state
        for place, value in enumerate(inputs):
            if place in self.held:
                self.sources[place] = detached(value)

    # What the code of the segment tells.

    def hold(self, place: Place, value: Any) -> None:
        """A value for recomputes to start from."""
        if place in self.held:
            self.sources[place] = detached(value)

    def know(self, value: torch.Tensor) -> None:
        """Told by the script."""

    def gone(self, *places: Place) -> None:
        """Told by the script."""

    def made(self, place: Place, value: Any, *gone: Place) -> None:
        """The node at `place` has run and gave `value`."""
        end = self.script.ends[len(self.ends)]
        if end.saved != self.saved:
            self._stray()
        elif self.pending:
            self._settle(end.own, value)
        self.ends.append(len(self.tokens))
        for part, slot in end.told:
            self.addresses[slot] = (value if part == WHOLE else value[part]).data_ptr()
        if place in self.held:
            self.sources[place] = detached(value)

    def finish(self) -> None:
        """The forward is through: tokens hold what they can be had from."""
        self.run.holds(self.tokens, self._course(), self.sources)

    def _course(self) -> Course:
        script = self.script
        if not self.astray and tuple(self.sources) == script.tokens.held:
            return script.course
        there = {~token.saved.wanted for token in self.tokens}
        self.run.dropped_state = {place: then for place, then in script.dropped_state.items() if place in there}
        return self.plan.course(self.run.left(self.tokens, self.ends, self.sources))

    # What autograd saves.

    def pack(self, tensor: torch.Tensor) -> Token | Kept:
        """What autograd is to hold for a tensor that an operator saves."""
        number = self.saved
        self.saved = number + 1
        if number < len(self.entries):
            entry = self.entries[number]
            kind = entry[0]
            if kind == WEIGHT:
                if type(tensor) is nn.Parameter or is_weight(tensor):
                    return (tensor, tensor._version, self.plan)
            elif kind == KEPT:
                return (tensor.detach(), tensor._version, self.plan)
            elif kind == VALUE:
                if _lies(tensor, self.addresses[entry[2]], entry):
                    token = Token(self.run, entry[1], None)
                    self.tokens.append(token)
                    return token
            elif kind == OWN:
                token = unsettled(self.run, (tensor.detach(), tensor._version, self.plan))
                self.pending.append(token)
                return token
        self._stray()
        return (tensor if is_weight(tensor) else tensor.detach(), tensor._version, self.plan)

    def _settle(self, entries: tuple[Entry, ...], value: Any) -> None:
        """Drop what the node that gave `value` has made for itself, or of its value, if it is as the script has it."""
        pending, self.pending = self.pending, []
        if len(pending) != len(entries):
            self._stray()
            return
        for token, entry in zip(pending, entries, strict=True):
            saved = entry.saved
            if entry.kind == VALUE:
                start = (value if saved.part == WHOLE else value[saved.part]).data_ptr()
                if not _lies(tensor_of(token), start, entry):
                    self._stray()
                    continue
            token.saved, token.kept = saved, None
            self.tokens.append(token)

    def _stray(self) -> None:
        self.astray, self.entries, self.pending = True, (), []
        for kind, script in [*self.plan.scripts.items()]:
            if script is self.script:
                self.plan.scripts[kind] = None


def _lies(tensor: torch.Tensor, start: int, entry: Entry) -> bool:
    """Whether the tensor lies as the entry says in the value that starts at `start`, and is no more than that."""
    _, _, _, ahead, size, stride, dtype = entry
    return (
        start != 0
        and tensor.data_ptr() == start + ahead
        and tensor.size() == size
        and tensor.stride() == stride
        and tensor.dtype is dtype
        and type(tensor) is torch.Tensor
    )
