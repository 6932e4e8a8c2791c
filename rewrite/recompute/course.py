"""The course of a backward through a segment: for each token that is cashed, what to run for it, and what goes then.

It depends on which tokens there are and on the order in which they are cashed, not on what the tensors hold. So it is
worked out when an order is met for the first time, and from then on looked up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from rewrite.recompute.again import Again, compile_ask
from rewrite.recompute.layers import owners_at

if TYPE_CHECKING:
    from rewrite.recompute.plan import Place, Plan, Step

ORDERS = 8
"""How many times the steps of one backward are remembered: whoever asks in ever new orders waits a little instead."""


class Tokens(NamedTuple):
    """What one forward has left: all that the course of a backward depends on."""

    wanted: tuple[Place, ...]
    """Of each token the value it stands for; `~place` for what an operator made for itself."""
    numbers: tuple[int, ...]
    """Of each token which of the tensors saved by its operator it is."""
    ends: tuple[int, ...]
    """How many tokens there were when each node ended."""
    held: tuple[Place, ...]
    """What there is to start from: inputs, kept values, and by `~place` masks and states of generators."""
    dropped_state: tuple[tuple[Place, tuple[int, ...]], ...]
    """Nodes whose operator's own tensors were dropped, and which of them those are."""

    def first(self, count: int, held: tuple[Place, ...]) -> Tokens:
        """The first `count` tokens alone, with this to start from."""
        wanted = self.wanted[:count]
        ends = tuple(min(end, count) for end in self.ends)
        dropped = tuple(entry for entry in self.dropped_state if ~entry[0] in wanted)
        return Tokens(wanted, self.numbers[:count], ends, held, dropped)


class Special(NamedTuple):
    """What running a node again takes beside its function."""

    step: Step
    seed: int | None
    """Where among the token's sources its mask or the state of the generators is."""
    captures: bool
    """Whether what its operator saves for itself is needed too."""


class Action(NamedTuple):
    """One node to run again."""

    place: Place
    function: Callable[..., Any]
    reads: tuple[Place, ...]
    gone: tuple[Place, ...]
    """Values that nothing needs any more then."""
    special: Special | None


def _then_gone(action: Action, place: Place) -> Action:
    return action._replace(gone=(*action.gone, place))


class Ask:
    """One token cashed, after those before it."""

    __slots__ = ("actions", "again", "fresh", "last", "left", "loads", "next", "read", "states", "to_come", "values")

    def __init__(self, left: dict[Place, int], fresh: set[Place], values: set[Place], states: dict[Place, set[int]],
                 to_come: int) -> None:  # fmt: skip
        self.left = left
        """Uses of each value still to come."""
        self.fresh = fresh
        """Values to be released that have not been computed yet."""
        self.values = values
        """Those that are there."""
        self.states = states
        """Of the nodes run for what their operators save: which tensors of it are there."""
        self.to_come = to_come
        """How many tokens are left; a new backward starts after the last."""
        self.loads: tuple[tuple[Place, int], ...] = ()
        """Values to take from the token's sources first, and where they are there."""
        self.actions: tuple[Action, ...] = ()
        self.again: Again
        """These as code, if there are any."""
        self.read: tuple[str, ...] = ()
        """The modules whose parameters the actions read, by path below the segment's."""
        self.last = False
        """Whether what the token stands for goes with it."""
        self.next: dict[int, Ask] = {}

    def owners(self, module: nn.Module) -> tuple[nn.Module, ...]:
        """The modules below the segment's whose parameters the actions read."""
        return owners_at(self.read)(module)

    def following(self) -> Ask:
        """The next one before anything is done for it."""
        states = {place: set(numbers) for place, numbers in self.states.items()}
        return Ask(dict(self.left), set(self.fresh), set(self.values), states, max(0, self.to_come - 1))


class Course:
    """The backwards that may follow a forward which left `tokens`."""

    def __init__(self, plan: Plan, tokens: Tokens) -> None:
        self.plan = plan
        self.tokens = tokens
        self.siblings = self._siblings() if plan.released else {}
        held = set(tokens.held)
        names: dict[tuple[Place, ...], int] = {}
        """What a token has to start from -> the number of such a group."""
        self.groups = tuple(
            names.setdefault(self._names(index, held), len(names)) for index in range(len(tokens.wanted))
        )
        """Of each token, in which of `names` its sources are named."""
        self.names = tuple(names)
        self.start = Ask(plan.uses(tokens.wanted), set(plan.released), set(), {}, len(tokens.wanted))
        self.room = ORDERS * len(tokens.wanted)
        """How many more asks are remembered."""

    def ask(self, before: Ask, index: int) -> Ask:
        """The token at `index` cashed after what came `before`."""
        found = before.next.get(index)
        if found is None:
            found = self._worked_out(before.following(), index)
            if found.actions:
                found.again = compile_ask(found)
            if self.room:
                self.room -= 1
                before.next[index] = found
        return found

    def _siblings(self) -> dict[int, tuple[Place, ...]]:
        """What a node saved is computed together, so that a released value is made once for all of it."""
        found: dict[int, tuple[Place, ...]] = {}
        for start, end in itertools.pairwise((0, *self.tokens.ends)):
            group = [index for index in range(start, end) if self.tokens.wanted[index] >= 0]
            found |= dict.fromkeys(group, tuple(self.tokens.wanted[index] for index in group))
        return found

    def _names(self, index: int, held: set[Place]) -> tuple[Place, ...]:
        wanted = {self.tokens.wanted[index], *self.siblings.get(index, ())}
        sources = (source for place in wanted for source in self.plan.sources(place) if source in held)
        return tuple(sorted(set(sources)))

    def _worked_out(self, ask: Ask, index: int) -> Ask:
        wanted = self.tokens.wanted[index]
        place = ~wanted if wanted < 0 else wanted
        if wanted < 0:
            if self.tokens.numbers[index] not in ask.states.get(place, ()):
                ask.left[wanted] = max(1, ask.left.get(wanted, 0))
                self._recompute(ask, (place,), index)
                if ask.left.get(place, 0) <= 0:  # its value is of no use
                    ask.values.discard(place)
                    ask.actions = (*ask.actions[:-1], _then_gone(ask.actions[-1], place))
            ask.states[place].discard(self.tokens.numbers[index])
        elif wanted not in ask.values:
            self._recompute(ask, (wanted, *self.siblings.get(index, ())), index)
        ask.left[wanted] = ask.left.get(wanted, 0) - 1
        ask.last = ask.left[wanted] <= 0
        if ask.last:
            ask.values.discard(wanted)
            if wanted < 0:
                del ask.states[place]
        return ask

    def _recompute(self, ask: Ask, wanted: tuple[Place, ...], index: int) -> None:
        """Have the first node in `wanted` run again, and the others of it that are not there and have uses to come,
        after those whose value they need."""
        names = self.names[self.groups[index]]
        steps, values, left = self.plan.steps, ask.values, ask.left
        order = {wanted[0], *(place for place in wanted[1:] if place not in values and left.get(place, 0) > 0)}
        last = dict[int, int]()
        todo = [*order]
        while todo:
            place = todo.pop()
            for source in steps[place].inputs:
                last[source] = max(place, last.get(source, 0))
                if source not in values and source not in order and source not in names:
                    order.add(source)
                    todo.append(source)
        loaded: dict[Place, int] = {}
        actions = []
        for place in sorted(order):
            step, gone = steps[place], list[int]()
            for source in step.inputs:
                if source not in values and source not in loaded:
                    loaded[source] = names.index(source)
            values.add(place)
            for source in step.inputs:
                left[source] = left.get(source, 0) - 1
                over = left[source] <= 0 or (source in ask.fresh and source not in wanted)
                if last[source] == place and (over or source in loaded):
                    gone.append(source)
                    values.discard(source)
            actions.append(Action(place, step.function, step.inputs, tuple(gone), self._special(ask, place, names)))
        ask.fresh -= order
        ask.loads, ask.actions = tuple(loaded.items()), tuple(actions)
        ask.read = tuple(dict.fromkeys(path for place in sorted(order) for path in steps[place].owners))

    def _special(self, ask: Ask, place: Place, names: tuple[Place, ...]) -> Special | None:
        step, dropped = self.plan.steps[place], dict(self.tokens.dropped_state)
        if step.plain and place not in dropped:
            return None
        captures = place in dropped and ask.left.get(~place, 0) > 0
        if captures:
            ask.states[place] = set(dropped[place])
        return Special(step, names.index(~place) if ~place in names else None, captures)
