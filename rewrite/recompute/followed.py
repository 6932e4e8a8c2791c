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
from rewrite.recompute.forward import Forward, tensor_of
from rewrite.recompute.plan import Place
from rewrite.recompute.script import KEPT, OWN, VALUE, WEIGHT, Entry, Script
from rewrite.recompute.tensors import detached, is_weight
from rewrite.recompute.tokens import WHOLE, Kept, Token, unsettled

_NONE = Entry(-1)
"""Where the script has come to its end."""


class Followed(Forward):
    """What is known in the forward of a segment, as the script has it.

    A value is known by its address: while it is alive nothing else has it, and alive it is wherever the script has it
    saved, as it is read there. That what is saved comes from the node the script says is checked when the node ends.
    """

    def __init__(self, run: Run, inputs: Sequence[Any], script: Script) -> None:
        super().__init__(run)
        self.script = script
        self.entries, self.ends = iter(script.entries), iter(script.ends)
        """What is to be saved next, and which node is to end next."""
        self.saved = 0
        """How many tensors were saved so far."""
        self.addresses = [-1] * len(script.entries)
        """Of each value by slot; one that has not been made has none."""
        self.astray = False
        run.need_grad, run.dropped_state = script.need_grad, script.dropped_state
        for place, value in enumerate(inputs):
            self.hold(place, value)

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
        saved, own, told = next(self.ends)
        if saved != self.saved:
            self._stray()
        elif self.pending:
            self._settle(own, value)
        for part, slot in told:
            self.addresses[slot] = (value if part == WHOLE else value[part]).data_ptr()
        if place in self.held:
            self.sources[place] = detached(value)

    def finish(self) -> None:
        """The forward is through: tokens hold what they can be had from."""
        script, run = self.script, self.run
        if not self.astray and tuple(self.sources) == script.tokens.held:
            run.holds(self.tokens, script.course, self.sources)
            return
        left = script.tokens.first(len(self.tokens), tuple(self.sources))
        run.dropped_state = {place: script.dropped_state[place] for place, _ in left.dropped_state}
        run.holds(self.tokens, self.plan.course(left), self.sources)

    # What autograd saves.

    def pack(self, tensor: torch.Tensor) -> Token | Kept:
        """What autograd is to hold for a tensor that an operator saves."""
        self.saved += 1
        entry = next(self.entries, _NONE)
        kind = entry.kind
        if kind == VALUE:
            if _lies(tensor, self.addresses[entry.slot], entry):
                token = Token(self.run, entry.saved, None)
                self.tokens.append(token)
                return token
        elif kind == WEIGHT:
            if type(tensor) is nn.Parameter or is_weight(tensor):
                return (tensor, tensor._version, self.plan)
        elif kind == KEPT:
            return (tensor.detach(), tensor._version, self.plan)
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
            part = entry.saved.part
            if entry.kind == VALUE and not _lies(
                tensor_of(token), (value if part == WHOLE else value[part]).data_ptr(), entry
            ):
                self._stray()
                return
            token.saved, token.kept = entry.saved, None
            self.tokens.append(token)

    def _stray(self) -> None:
        """Drop no more: the tokens are the first of those that the script has."""
        self.astray, self.entries, self.pending = True, iter(()), []
        for kind, script in [*self.plan.scripts.items()]:
            if script is self.script:
                self.plan.scripts[kind] = None


def _lies(tensor: torch.Tensor, start: int, entry: Entry) -> bool:
    """Whether the tensor lies as the entry says in the value that starts at `start`, and is no more than that."""
    _, _, _, ahead, size, stride, dtype = entry
    return (
        tensor.data_ptr() == start + ahead
        and tensor.size() == size
        and tensor.stride() == stride
        and tensor.dtype is dtype
        and type(tensor) is torch.Tensor
    )
