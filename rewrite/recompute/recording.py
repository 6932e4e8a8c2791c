"""A forward in which what autograd saves is told by identity.

While the forward holds a value of the segment, it is known by its storage,
which no other tensor can have then; a tensor that is saved and not known is one that an operator made for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rewrite.recompute import nesting
from rewrite.recompute.course import Tokens
from rewrite.recompute.demand import Run
from rewrite.recompute.forward import Forward, tensor_of
from rewrite.recompute.plan import Place
from rewrite.recompute.script import Learner
from rewrite.recompute.states import limit_bytes
from rewrite.recompute.tensors import detached, is_plain, is_weight
from rewrite.recompute.tokens import WHOLE, Kept, Saved, Token

_NOTHING = torch.empty(0)
_UNKNOWN, _APART = (-1, WHOLE, _NOTHING), (-1, WHOLE, _NOTHING)
"""What is known of a tensor that an operator made for itself, and of one that is not told by its storage."""


class Recording(Forward):
    """What is known in the forward of a segment."""

    def __init__(self, run: Run, inputs: Sequence[Any], learner: Learner | None = None) -> None:
        super().__init__(run)
        self.dropped = run.plan.dropped
        self.learner = learner
        """Takes notes for forwards to come."""
        self.live: dict[int, tuple[Place, int, torch.Tensor]] = {}
        """Storage -> the value in it, by place and part. Holding it, so that the storage stays its own."""
        self.storages: dict[Place, tuple[int, ...]] = {}
        self.holders: dict[int, int] = {}
        """Storage -> how many values lie in it: what is a view is for the kernels to say, not for the capture."""
        self.ends: list[int] = []
        """How many tokens there were when each node ended."""
        self.saved = 0
        """How many tensors were saved so far."""
        self.since = 0
        """How many when a node last ended."""
        self.holder: Recording | None = nesting.holder()
        self.promised: set[Place] = set()
        """Inputs that the holder, the run around, makes again."""
        for place, value in enumerate(inputs):
            self.given(place, value)

    # What the code of the segment tells.

    def given(self, place: Place, value: Any) -> None:
        """An input, held here unless the run around makes it again."""
        if self.holder is None or not self.holder.makes_again(value):
            self.hold(place, value)
            return
        self._know(place, value)
        self.promised.add(place)
        if place in self.held:
            self.sources[place] = self.holder.pack(value)

    def makes_again(self, value: Any) -> bool:
        """Whether a block inside need not hold this input of its own."""
        if not (isinstance(value, torch.Tensor) and is_plain(value)):
            return False
        place, _, known = self.live.get(value.untyped_storage()._cdata, _UNKNOWN)
        return place in self.dropped and _reads_alike(value, known)

    def hold(self, place: Place, value: Any) -> None:
        """A value for recomputes to start from: an input, a kept value, a number."""
        self._know(place, value)
        if place in self.held:
            self.sources[place] = detached(value)

    def know(self, value: torch.Tensor) -> None:
        """A buffer: what is saved of it is no operator's own."""
        self._know(-1, value)

    def made(self, place: Place, value: Any, *gone: Place) -> None:
        """The node at `place` has run and gave `value`, and nothing will use the values at `gone` again.

        What was saved since the last node ended is its doing.
        """
        if self.pending:
            self._settle(place, value)
        if self.learner is not None:
            self.learner.made(place, self.saved)
        self.since = self.saved
        self.ends.append(len(self.tokens))
        if place in self.held:
            self.hold(place, value)
        else:
            self._know(place, value)
        if gone:
            self.gone(*gone)

    def gone(self, *places: Place) -> None:
        """The forward will not use these values again."""
        for place in places:
            for storage in self.storages.pop(place, ()):
                others = self.holders[storage] - 1
                if others:
                    self.holders[storage] = others
                else:
                    del self.live[storage], self.holders[storage]

    def finish(self) -> None:
        """The forward is through: tokens hold what they can be had from."""
        tokens = self.left()
        course = self.plan.course(tokens)
        if self.learner is not None:
            self.learner.learned(self.run, tokens, course)
        self.run.holds(self.tokens, course, self.sources)

    def left(self) -> Tokens:
        """What the forward has left."""
        return Tokens(
            tuple([token.saved.wanted for token in self.tokens]),
            tuple([token.saved.number for token in self.tokens]),
            tuple(self.ends),
            tuple(self.sources),
            tuple([(place, tuple(numbers)) for place, (_, numbers) in self.run.dropped_state.items()]),
        )

    def forget(self) -> None:
        """Hold nothing any more but what tokens hold."""
        super().forget()
        self.live, self.storages, self.holders, self.holder, self.learner = {}, {}, {}, None, None

    def _know(self, place: Place, value: Any) -> None:
        if type(value) is torch.Tensor or isinstance(value, torch.Tensor):  # the metaclass of classes takes its time
            self._know_part(place, WHOLE, value)
        elif isinstance(value, (tuple, list)):
            for part, item in enumerate(value):
                if isinstance(item, torch.Tensor):  # what is nested deeper counts as the operator's own
                    self._know_part(place, part, item)

    def _know_part(self, place: Place, part: int, value: torch.Tensor) -> None:
        if value.layout != torch.strided:
            return
        self.run.need_grad[place] = value.requires_grad
        storage = value.untyped_storage()._cdata
        if storage in self.live:
            self.holders[storage] += 1
        else:
            self.live[storage] = (place, part, value)
            self.holders[storage] = 1
        if place in self.storages:
            self.storages[place] = (*self.storages[place], storage)
        else:
            self.storages[place] = (storage,)

    # What autograd saves.

    def pack(self, tensor: torch.Tensor) -> Token | Kept:
        """What autograd is to hold for a tensor that an operator saves."""
        self.saved += 1
        held, value = self._packed(tensor)
        if self.learner is not None:
            self.learner.saved(held, tensor, value)
        return held

    def _packed(self, tensor: torch.Tensor) -> tuple[Token | Kept, torch.Tensor | None]:
        """What to hold; the value too that the tensor lies in, if it is to be computed again for it."""
        if is_weight(tensor):
            return (tensor, tensor._version, self.plan), None
        known = self.live.get(tensor.untyped_storage()._cdata, _UNKNOWN) if is_plain(tensor) else _APART
        place, part, value = known
        if place in self.dropped and _reads_alike(tensor, value):
            token = self._token(place, part, value, tensor)
            self.tokens.append(token)
            return token, value
        if place in self.promised and self.holder is not None:
            return self.holder.pack(tensor), None
        # An operator's own result would hold, through its graph, its token: what is kept is kept without its graph.
        kept = (tensor.detach(), tensor._version, self.plan)
        if known is not _UNKNOWN:
            return kept, None
        token = Token(self.run, Saved(0, WHOLE, self.saved - 1 - self.since, None), kept)
        self.pending.append(token)
        return token, None

    def _token(self, place: Place, part: int, value: torch.Tensor, tensor: torch.Tensor) -> Token:
        """A token for `tensor`, which lies in the storage of `value`."""
        number = self.saved - 1 - self.since
        return Token(self.run, Saved(place, part, number, _geometry(tensor, value)), None)

    def _settle(self, place: Place, value: Any) -> None:
        """Say of the pending tokens which are (of) the node's value, and drop what is large and not to be kept."""
        several = enumerate(value) if isinstance(value, (tuple, list)) else [(WHOLE, value)]
        tensors = [(part, item) for part, item in several if isinstance(item, torch.Tensor)]
        results = {item.untyped_storage()._cdata: (part, item) for part, item in tensors}
        own = {storage._cdata: storage.nbytes() for storage in map(_storage_of, self.pending)}
        sizes = [size for storage, size in own.items() if storage not in results]
        limit = limit_bytes(sizes, sum(item.untyped_storage().nbytes() for _, item in tensors))
        for token in self.pending:
            tensor, number = tensor_of(token), token.saved.number
            storage = tensor.untyped_storage()
            item: torch.Tensor | None = None
            if storage._cdata in results:
                part, item = results[storage._cdata]
                if place not in self.dropped or not _reads_alike(tensor, item):
                    continue
                token.saved = Saved(place, part, number, _geometry(tensor, item))
            elif place not in self.plan.kept_state and storage.nbytes() > limit:
                token.saved = Saved(~place, WHOLE, number, None)
                self.run.dropped_state.setdefault(place, (self.saved - self.since, []))[1].append(number)
            else:
                continue
            token.kept = None
            self.tokens.append(token)
            if self.learner is not None:
                self.learner.settled(token.saved, tensor, item)
        self.pending = []


def _geometry(tensor: torch.Tensor, value: torch.Tensor) -> tuple[Any, Any, Any] | None:
    """How `tensor` lies in its storage, unless as `value` does."""
    if tensor is value:
        return None
    geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())
    return None if geometry == (value.size(), value.stride(), value.storage_offset()) else geometry


def _reads_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the same bytes of a storage stand for the same numbers in both."""
    return one.dtype == other.dtype and one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg()


def _storage_of(token: Token) -> torch.UntypedStorage:
    return tensor_of(token).untyped_storage()
