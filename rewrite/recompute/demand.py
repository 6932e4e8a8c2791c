"""Run a segment so that autograd holds tokens in place of its values, and compute a value when its token is cashed.

What autograd saves is told by identity: while the forward holds a value of the segment, it is known by its storage,
which no other tensor can have then; a tensor that is saved and not known is one that an operator made for itself. In
the backward the value a token stands for is computed from what is held, with whatever lies between and is not there
already, and each value goes at its last use.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from rewrite.errors import RecomputeError
from rewrite.gate import GATE
from rewrite.recompute import dropout, nesting
from rewrite.recompute.buffers import copied_buffers
from rewrite.recompute.course import Ask, Course, Special, Tokens
from rewrite.recompute.plan import Place, Plan, Step
from rewrite.recompute.replay import as_surrounded, random_state, replayed, surroundings
from rewrite.recompute.settings import Settings, as_set
from rewrite.recompute.tensors import detached, is_plain, is_weight, leaf_of, never
from rewrite.recompute.tokens import WHOLE, Kept, Token, unpack
from rewrite.recompute.unchanged import Weights, changed, modules_of

LARGE_STATE = 16
"""What an operator saves for itself is dropped if it takes more than one part in 16 of its result's bytes."""

_NOTHING = torch.empty(0)
_UNKNOWN, _APART = (-1, WHOLE, _NOTHING), (-1, WHOLE, _NOTHING)
"""What is known of a tensor that an operator made for itself, and of one that is not told by its storage."""


def run_planned(run: Run, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The results of the segment; the backward computes its values again as the run's plan says."""
    try:
        with saved_tensors_hooks(run.pack, unpack):
            results = run.plan.recorded(run.module, run, *inputs)
        run.finish()
    finally:
        run.forget()  # after an error too: values hold, through their graphs, tokens, and these the run
    return results


class Run:
    """One forward of a segment, and the backwards through it."""

    def __init__(self, plan: Plan, module: nn.Module, inputs: Sequence[Any]) -> None:
        self.plan = plan
        self.dropped = plan.dropped
        self.module = module
        self.surroundings = surroundings()
        self.devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
        owners = plan.owners(module)
        self.weights = Weights(owners, [module.get_buffer(path) for path in plan.written])
        self.settings = Settings(modules_of(owners))
        # During the forward.
        self.live: dict[int, tuple[Place, int, torch.Tensor]] = {}
        """Storage -> the value in it, by place and part. Holding it, so that the storage stays its own."""
        self.storages: dict[Place, tuple[int, ...]] = {}
        self.holders: dict[int, int] = {}
        """Storage -> how many values lie in it: what is a view is for the kernels to say, not for the capture."""
        self.saved = 0
        """Tensors saved since a node last ended."""
        self.pending: list[Token] = []
        """Tokens for tensors that are not known: the operator that runs has made them."""
        self.tokens: list[Token] = []
        self.ends: list[int] = []
        """How many tokens there were when each node ended."""
        self.sources: dict[Place, Any] = {}
        """Inputs, kept values, numbers, masks and states of generators; given to the tokens at the end."""
        # From the forward on.
        self.versions: dict[Place, int] = {}
        self.need_grad: dict[Place, bool] = {}
        self.holder: Run | None = nesting.holder()
        self.promised: set[Place] = set()
        """Inputs that the holder, the run around, makes again."""
        self.dropped_state: dict[Place, tuple[int, list[int]]] = {}
        """Nodes whose operator's own tensors were dropped: how many tensors it saved, and which of them those were."""
        self.course: Course
        """What backwards do, known when the forward is through."""
        # During a backward.
        self.lock = threading.RLock()
        """Threads may run backwards through one graph."""
        self.before: Ask | None = None
        """What was asked for last."""
        self.values: dict[Place, Any] = {}
        """Values that are there, and by `~place` what operators saved for themselves, by number."""
        for place, value in enumerate(inputs):
            self.given(place, value)

    # What the recorded forward tells.

    def given(self, place: Place, value: Any) -> None:
        """An input, held here unless the run around makes it again."""
        if self.holder is None or not self.holder.makes_again(value):
            self.hold(place, value)
            return
        self._know(place, value)
        self.promised.add(place)
        if place in self.plan.held:
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
        if place in self.plan.held:
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
        self.saved = 0
        self.ends.append(len(self.tokens))
        if place in self.plan.held:
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

    def draws(self, place: Place) -> None:
        """The node at `place` is about to draw random numbers."""
        self.sources[~place] = random_state(self.devices)

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
            if _tensor_of(token).untyped_storage()._cdata == storage:
                token.kept = mask
        self.pending = [token for token in self.pending if token.kept is not mask]
        return result

    def dropout_module(self, place: Place, module: nn.Dropout, value: torch.Tensor) -> Any:
        """The same for a layer."""
        return self.dropout(place, value, module.p, module.training)

    def finish(self) -> None:
        """The forward is through: tokens hold what they can be had from."""
        sources = self.sources
        self.course = course = self.plan.course(
            Tokens(
                tuple([token.wanted for token in self.tokens]),
                tuple([token.number for token in self.tokens]),
                tuple(self.ends),
                tuple(sources),
                tuple([(place, tuple(numbers)) for place, (_, numbers) in self.dropped_state.items()]),
            )
        )
        groups = [tuple([sources[name] for name in names]) for names in course.names]
        for index, (token, group) in enumerate(zip(self.tokens, course.groups, strict=True)):
            token.index, token.sources = index, groups[group]
        tensors = ((place, value) for place, value in sources.items() if isinstance(value, torch.Tensor))
        self.versions = {place: value._version for place, value in tensors if not value.is_inference()}

    def forget(self) -> None:
        """Hold nothing any more but what tokens hold."""
        self.live, self.storages, self.holders, self.sources = {}, {}, {}, {}
        self.tokens, self.pending, self.ends, self.holder = [], [], [], None

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
        self.need_grad[place] = value.requires_grad
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
        number = self.saved
        self.saved = number + 1
        if is_weight(tensor):
            return (tensor, tensor._version, self.plan)
        known = self.live.get(tensor.untyped_storage()._cdata, _UNKNOWN) if is_plain(tensor) else _APART
        if known[0] in self.dropped:
            token = Token(self, number, None)
            if self._points(token, *known, tensor):
                return token
        elif known[0] in self.promised and self.holder is not None:
            return self.holder.pack(tensor)
        # An operator's own result would hold, through its graph, its token: what is kept is kept without its graph.
        kept = (tensor.detach(), tensor._version, self.plan)
        if known is not _UNKNOWN:
            return kept
        token = Token(self, number, kept)
        self.pending.append(token)
        return token

    def _points(self, token: Token, place: Place, part: int, value: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Have the token stand for `tensor`, which lies in the storage of `value`; False if it cannot."""
        if tensor is not value:
            if not _reads_alike(tensor, value):
                return False
            geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())
            if geometry != (value.size(), value.stride(), value.storage_offset()):
                token.geometry = geometry
        token.wanted, token.part, token.kept = place, part, None
        self.tokens.append(token)
        return True

    def _settle(self, place: Place, value: Any) -> None:
        """Say of the pending tokens which are (of) the node's value, and drop what is large and not to be kept."""
        several = enumerate(value) if isinstance(value, (tuple, list)) else [(WHOLE, value)]
        tensors = [(part, item) for part, item in several if isinstance(item, torch.Tensor)]
        results = {item.untyped_storage()._cdata: (part, item) for part, item in tensors}
        limit = sum(item.untyped_storage().nbytes() for _, item in tensors) // LARGE_STATE
        for token in self.pending:
            tensor = _tensor_of(token)
            own = tensor.untyped_storage()
            if own._cdata in results:
                if place in self.dropped:
                    part, item = results[own._cdata]
                    self._points(token, place, part, item, tensor)
            elif place not in self.plan.kept_state and own.nbytes() > limit:
                token.wanted, token.kept = ~place, None
                self.tokens.append(token)
                self.dropped_state.setdefault(place, (self.saved, []))[1].append(token.number)
        self.pending = []

    # What the backward asks for.

    def cashed(self, token: Token) -> torch.Tensor:
        """The tensor of a token that is not kept."""
        with self.lock:
            return self._cashed(token)

    def _cashed(self, token: Token) -> torch.Tensor:
        before = self.before
        if before is None or not before.to_come:  # a new backward
            self.values, before = {}, self.course.start
        ask = before.next.get(token.index) or self.course.ask(before, token.index)
        self.before = None  # an error ends the backward: what asks after it starts anew
        values, place = self.values, token.wanted
        if ask.actions:
            self._recompute(ask, token.sources)
        self.before = ask
        if place < 0:
            own: torch.Tensor = values[place].pop(token.number)
            if ask.last:
                del values[place]
            return own
        value = values.pop(place) if ask.last else values[place]
        tensor: torch.Tensor = value if token.part == WHOLE else value[token.part]
        return tensor if token.geometry is None else tensor.as_strided(*token.geometry)

    def _recompute(self, ask: Ask, sources: tuple[Any, ...]) -> None:
        """Run the nodes of an ask as in the forward, and hold their values as long as they are needed."""
        with GATE, as_surrounded(self.surroundings):
            self.weights.check(self.plan.path, self.module, ask.owners)
            others = self.settings.changed()
            if not others:
                self._run(ask, sources)
                return
            with as_set(others):
                self._run(ask, sources)

    def _run(self, ask: Ask, sources: tuple[Any, ...]) -> None:
        values, module, versions = self.values, self.module, self.versions
        for place, index in ask.loads:
            value = sources[index]
            if type(value) is Token:
                value = unpack(value)
            values[place] = value
            if place in versions and value._version != versions[place]:
                raise changed(self.plan.path, "a value it starts from was changed in place")
        for place, function, reads, gone, special in ask.actions:
            given = [values[each] for each in reads]
            if special is None:
                values[place] = function(module, *given)
            else:
                seed = None if special.seed is None else sources[special.seed]
                values[place] = self._again(place, special, given, seed)
            del given
            for each in gone:
                del values[each]

    def _again(self, place: Place, special: Special, given: list[Any], seed: Any) -> Any:
        """The value of a node once more, and what its operator saves for itself if that was dropped."""
        step = special.step
        if type(seed) is dropout.Mask:
            return seed.applied(given[0])

        def run() -> Any:
            with copied_buffers(self.module, step.buffers):
                if special.captures:
                    return self._captured(place, step, given)
                return step.function(self.module, *given)

        return run() if seed is None else replayed(seed, run)

    def _captured(self, place: Place, step: Step, given: list[Any]) -> Any:
        """Run a node under grad mode for the tensors that its operator saves."""
        saved: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> None:
            saved.append(tensor.detach())

        count, numbers = self.dropped_state[place]
        flags = [self.need_grad.get(each, flag) for each, flag in zip(step.inputs, step.need_grad, strict=True)]
        again = [leaf_of(value, flag) for value, flag in zip(given, flags, strict=True)]
        with self.weights.trained_as_then(), torch.enable_grad(), saved_tensors_hooks(collect, never):
            result = detached(step.function(self.module, *again))
        if len(saved) != count:
            raise RecomputeError(
                f"recompute of {self.plan.path or 'the model'!r}",
                f"an operator saved {count} tensors for its backward, and {len(saved)} when it was run again",
                "leave this module out of Checkpoint (select=), and report the model",
            )
        self.values[~place] = {number: saved[number] for number in numbers}
        return result


def _reads_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the same bytes of a storage stand for the same numbers in both."""
    return one.dtype == other.dtype and one.is_conj() == other.is_conj() and one.is_neg() == other.is_neg()


def _tensor_of(token: Token) -> torch.Tensor:
    """What a token holds that is not settled."""
    return token.kept[0]  # type: ignore[index]
