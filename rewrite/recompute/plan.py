"""What is known of a recompute segment before it runs: its steps, and what each needs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rewrite.recompute.course import Course, Tokens
from rewrite.recompute.layers import Owners

if TYPE_CHECKING:
    from rewrite.recompute.script import Script

Place = int
"""Number of a value in a segment: first its inputs, then its nodes in graph order. `~place` stands for what belongs to
the node at `place` beside its value: what its operator saves for itself, the random numbers it draws."""


@dataclass(frozen=True)
class Step:
    """How one value of a segment is computed again."""

    function: Callable[..., Any]
    """`function(module, *values)` of `inputs` gives the value."""
    inputs: tuple[Place, ...]
    need_grad: tuple[bool, ...]
    """Which of the inputs needed a gradient when the graph was captured."""
    random: bool = False
    """Whether it may draw random numbers: it is run again from the generator's state of the forward."""
    masked: bool = False
    """Whether it is a dropout that runs from a kept mask, where its device lets it."""
    buffers: tuple[str, ...] = ()
    """Buffers it writes, by path below the module: a recompute writes to copies."""
    owners: tuple[str, ...] = ()
    """The modules whose parameters it reads, by path below the module."""

    @functools.cached_property
    def plain(self) -> bool:
        """Whether the function alone gives the value."""
        return not self.random and not self.buffers


@dataclass(frozen=True, eq=False)
class Plan:
    """A segment whose values are dropped after the forward, but for some that are kept."""

    path: str
    """Module path of the region, for messages."""
    forward: Callable[..., tuple[Any, ...]]
    """`forward(module, *inputs)`: the segment as it is."""
    recorded: Callable[..., tuple[Any, ...]]
    """`recorded(module, run, *inputs)`: the same, telling `run` of each value as it is made."""
    steps: dict[Place, Step]
    """For each node that can be run again."""
    kept: frozenset[Place]
    """Nodes whose value is kept; those without a step among them."""
    kept_state: frozenset[Place]
    """Nodes of which is kept what their operator saves for itself; those without a step among them."""
    owners: Owners
    """The modules whose parameters the steps read."""
    released: frozenset[Place] = frozenset()
    """Nodes whose value goes after its first run in a backward, and is computed once more where it is needed next. Of
    what passes between blocks: each time it is asked for."""
    passing: bool = False
    """Whether the nodes are calls of blocks, and what is between: `rewrite.recompute.passing`."""
    unread: dict[Place, frozenset[int]] = field(default_factory=dict)
    """Of blocks that give several values those that nothing reads, by position."""
    dropped: frozenset[Place] = frozenset()
    """Nodes whose value is not kept."""
    written: tuple[str, ...] = ()
    """Buffers that layers write when they run."""
    held: frozenset[Place] = frozenset()
    """Values that a step reads and that are no step's to make: what is held for recomputes to start from."""
    by_data: bool = False
    """Whether the data of its inputs, beside their shapes, decides what a forward saves."""
    scripts: dict[Hashable, Script | None] = field(default_factory=dict, compare=False, repr=False)
    """What forwards save, by the kind of call; None where one saved something else than another."""
    _sources: dict[Place, tuple[Place, ...]] = field(default_factory=dict, compare=False, repr=False)
    _uses: dict[Any, dict[Place, int]] = field(default_factory=dict, compare=False, repr=False)
    _courses: dict[Tokens, Course] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        dropped = frozenset(self.steps) - self.kept
        read = {source for step in self.steps.values() for source in step.inputs}
        written = dict.fromkeys(path for step in self.steps.values() for path in step.buffers)
        object.__setattr__(self, "dropped", dropped)
        object.__setattr__(self, "written", tuple(written))
        object.__setattr__(self, "held", frozenset(read - dropped))

    def sources(self, wanted: Place) -> tuple[Place, ...]:
        """What is held for the sake of `wanted`, a value or a `~place`."""
        found = self._sources.get(wanted)
        if found is None:
            needed = self.needed((wanted,))
            read = {source for place in needed for source in self.steps[place].inputs} - (needed & self.dropped)
            random = {~place for place in needed if self.steps[place].random}
            found = self._sources[wanted] = tuple(sorted(read | random))
        return found

    def uses(self, wanted: tuple[Place, ...]) -> dict[Place, int]:
        """How often each value is used in a backward that asks for all of `wanted`, and recomputes for them."""
        found = self._uses.get(wanted)
        if found is None:
            counted = Counter(wanted)
            for place in self.needed(wanted):
                for source in self.steps[place].inputs:
                    counted[source] += 1 + (place in self.released)
            found = self._uses[wanted] = dict(counted)
        return found

    def course(self, tokens: Tokens) -> Course:
        """The backwards that may follow a forward which left `tokens`."""
        found = self._courses.get(tokens)
        if found is None:
            found = self._courses[tokens] = Course(self, tokens)
        return found

    def needed(self, wanted: Iterable[Place]) -> set[Place]:
        """The nodes to run for `wanted` when nothing but what is held is there."""
        needed: set[Place] = set()
        todo = [place if place in self.dropped else ~place for place in wanted if place in self.dropped or place < 0]
        while todo:
            place = todo.pop()
            if place not in needed:
                needed.add(place)
                todo.extend(source for source in self.steps[place].inputs if source in self.dropped)
        return needed
