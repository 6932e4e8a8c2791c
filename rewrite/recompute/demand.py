"""Compute the value that a token stands for when the backward asks.

It is computed from what is held, with whatever lies between and is not there already; each value goes at its last use.
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
from rewrite.recompute import dropout
from rewrite.recompute.buffers import copied_buffers
from rewrite.recompute.course import Ask, Course, Special
from rewrite.recompute.layers import layers_of
from rewrite.recompute.plan import Place, Plan, Step
from rewrite.recompute.replay import as_surrounded, replayed, surroundings
from rewrite.recompute.settings import Settings, as_set
from rewrite.recompute.tensors import detached, leaf_of, never
from rewrite.recompute.tokens import WHOLE, Token, unpack
from rewrite.recompute.unchanged import Weights, changed


class Run:
    """One forward of a segment, as the backwards through it know it."""

    def __init__(self, plan: Plan, module: nn.Module, inputs: Sequence[Any]) -> None:
        self.plan = plan
        self.module = module
        self.surroundings = surroundings()
        self.devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
        layers = layers_of(plan, module)
        self.weights = Weights(layers, [module.get_buffer(path) for path in plan.written])
        self.settings = Settings(layers)
        # What the forward tells.
        self.versions: dict[Place, int] = {}
        self.need_grad: dict[Place, bool] = {}
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

    def holds(self, tokens: Sequence[Token], course: Course, sources: dict[Place, Any]) -> None:
        """The forward is through, and left `tokens`, which hold those of `sources` that they can be had from."""
        self.course = course
        groups = [tuple([sources[name] for name in names]) for names in course.names]
        for index, (token, group) in enumerate(zip(tokens, course.groups, strict=True)):
            token.index, token.sources = index, groups[group]
        self.versions = versions_of(sources)

    def cashed(self, token: Token) -> torch.Tensor:
        """The tensor of a token that is not kept."""
        with self.lock:
            return self._cashed(token)

    def _cashed(self, token: Token) -> torch.Tensor:
        before = self.before
        if before is None or not before.to_come:  # a new backward
            self.values, before = {}, self.course.start
        ask = before.next.get(token.index) or self.course.ask(before, token.index)
        if ask.actions:
            self.before = None  # an error ends the backward: what asks after it starts anew
            self._recompute(ask, token.sources)
        self.before = ask
        place, part, number, geometry = token.saved
        if place < 0:
            own: torch.Tensor = self.values[place].pop(number)
            if ask.last:
                del self.values[place]
            return own
        value = self.values.pop(place) if ask.last else self.values[place]
        tensor: torch.Tensor = value if part == WHOLE else value[part]
        return tensor if geometry is None else tensor.as_strided(*geometry)

    def _recompute(self, ask: Ask, sources: tuple[Any, ...]) -> None:
        """Run the nodes of an ask as in the forward, and hold their values as long as they are needed."""
        with GATE, as_surrounded(self.surroundings):
            self.weights.check(self.plan.path, self.module, ask.owners)
            others = self.settings.changed()
            if not others:
                ask.again(self, self.values, sources)
                return
            with as_set(others):
                ask.again(self, self.values, sources)

    # What the code of an ask calls.

    def loaded(self, place: Place, source: Any) -> Any:
        """A value to start from, unless it was changed."""
        value = unpack(source) if type(source) is Token else source
        if place in self.versions and value._version != self.versions[place]:
            raise changed(self.plan.path, "a value it starts from was changed in place")
        return value

    def special(self, place: Place, special: Special, given: list[Any], seed: Any) -> Any:
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


def versions_of(values: dict[Place, Any]) -> dict[Place, int]:
    """How often each of the tensors among `values` has been written."""
    tensors = ((place, value) for place, value in values.items() if isinstance(value, torch.Tensor))
    return {place: value._version for place, value in tensors if not value.is_inference()}
