"""Between blocks: drop what passes from one block to the next, and make it again when a later block's backward asks.

A block of the segment holds for itself what it needs within. What it is given it would hold too, for its own recompute;
here it holds a token instead (recursive checkpointing: Griewank and Walther 2000, "Algorithm 799: Revolve"). To cash
one, the blocks between the nearest value that is there and the wanted one run again, without recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rewrite.gate import GATE
from rewrite.recompute import dropout, nesting
from rewrite.recompute.buffers import copied_buffers
from rewrite.recompute.demand import Run, versions_of
from rewrite.recompute.layers import owners_at
from rewrite.recompute.plan import Place, Plan
from rewrite.recompute.recording import Recording
from rewrite.recompute.replay import as_surrounded, replayed
from rewrite.recompute.settings import as_set
from rewrite.recompute.tensors import detached
from rewrite.recompute.tokens import WHOLE, Token
from rewrite.recompute.unchanged import changed


class Passing(Run):
    """One forward of a segment of blocks, as the backwards through it know it.

    A backward comes to the blocks from the last to the first. A value that was made again is there for the blocks
    before, and goes as soon as one made earlier is asked for: only blocks after it read it.
    """

    def __init__(self, plan: Plan, module: nn.Module, inputs: Sequence[Any]) -> None:
        super().__init__(plan, module, inputs)
        self.choices: dict[Place, list[Any]] = {}
        """The code that each block, and those within it, ran."""
        self.wanted: frozenset[tuple[Place, int]] = frozenset()
        """Values that tokens stand for, and which part of each."""
        self.held: dict[Place, Any] = {}
        """What there is to start from."""

    def read(self, place: Place, value: Any) -> Any:
        """What a node gave, without what neither a node reads nor a token stands for."""
        unread = self.plan.unread.get(place)
        if not unread:
            return value
        wanted = {token_part for at, token_part in self.wanted if at == place}
        return tuple(None if part in unread - wanted else item for part, item in enumerate(value))

    def _cashed(self, token: Token) -> torch.Tensor:
        saved, values = token.saved, self.values
        place = saved.wanted
        for later in [each for each in values if each > place]:
            del values[later]
        value = values[place] if place in values else self._made_again(place)
        tensor: torch.Tensor = value if saved.part == WHOLE else value[saved.part]
        return tensor if saved.geometry is None else tensor.as_strided(*saved.geometry)

    def _made_again(self, wanted: Place) -> Any:
        """The value at `wanted`; those on the way that tokens stand for are there from then on."""
        order = self._to_run(wanted)
        steps, there = self.plan.steps, dict(self.values)
        held = {place for place, _ in self.wanted} - self.plan.released
        last = {source: place for place in order for source in steps[place].inputs}
        with GATE, as_surrounded(self.surroundings), as_set(self.settings.changed()):
            for place in order:
                self.weights.check(self.plan.path, self.module, owners_at(steps[place].owners))
                given = [self._value(each, there) for each in steps[place].inputs]
                there[place] = self.read(place, self._run_again(place, given))
                del given
                for source in steps[place].inputs:
                    if last[source] == place:
                        there.pop(source, None)
                if place in held:
                    self.values[place] = there[place]
        return there[wanted]

    def _to_run(self, wanted: Place) -> list[Place]:
        """The nodes to run for a value, in order."""
        found, todo = set[Place](), [wanted]
        while todo:
            place = todo.pop()
            if place not in found and place not in self.values and place in self.plan.dropped:
                found.add(place)
                todo.extend(self.plan.steps[place].inputs)
        return sorted(found)

    def _value(self, place: Place, there: dict[Place, Any]) -> Any:
        if place in there:
            return there[place]
        value = self.held[place]
        if place in self.versions and value._version != self.versions[place]:
            raise changed(self.plan.path, "a value it starts from was changed in place")
        return value

    def _run_again(self, place: Place, given: list[Any]) -> Any:
        step = self.plan.steps[place]
        seed = self.held.get(~place)
        if type(seed) is dropout.Mask:
            return seed.applied(given[0])

        def run() -> Any:
            with copied_buffers(self.module, step.buffers), nesting.block_again(self.choices.get(place, [])):
                return detached(step.function(self.module, *given))

        return run() if seed is None else replayed(seed, run)


class Passage(Recording):
    """What is known in the forward of a segment of blocks."""

    run: Passing

    def block(self, place: Place, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The block that the node at `place` calls."""
        choices = self.run.choices[place] = list[Any]()
        with nesting.block(self, choices):
            return module(*args, **kwargs)

    def finish(self) -> None:
        """The forward is through."""
        run = self.run
        run.wanted = frozenset((token.saved.wanted, token.saved.part) for token in self.tokens)
        run.held = dict(self.sources)
        run.versions = versions_of(run.held)

    def _know(self, place: Place, value: Any) -> None:
        super()._know(place, self.run.read(place, value))
