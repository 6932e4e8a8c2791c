"""Options that hold nothing of what passes from one block to the next, but have it made again.

Once for a group of blocks in a row, of which only the first one's input is held (Chen et al. 2016, "Training Deep Nets
with Sublinear Memory Cost", section 4.1), with what blocks keep within chosen as ever; or each time that a block's
backward asks for it, which holds least.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

from rewrite.plan.curve import EACH, ONCE, Point
from rewrite.plan.joints import Joint, find_joints, stacks_of
from rewrite.plan.measure import Footprint, Maker, measure
from rewrite.plan.options import Options
from rewrite.plan.outline import Outline
from rewrite.plan.pieces import value_text
from rewrite.plan.price import STEP_SECONDS
from rewrite.plan.profile import RANDOM_STATE_BYTES
from rewrite.plan.stage import Stage
from rewrite.program import Program

LARGE = 16
"""What passes is made again for each use where it is at least one part in 16 of what the block's backward holds."""
FEW = 4
"""Blocks of a stack up to which the first of them too may have what it is given made again for each use."""
LOWEST = 3
"""So many of a block's options are tried that way: those whose backward holds least."""


Choice = tuple[Point | None, Footprint]


def with_passing(
    found: Outline,
    program: Program,
    options: Sequence[Options],
    accumulating: Sequence[tuple[str, ...]],
    stage: Stage,
    known: dict[Hashable, Footprint],
) -> tuple[Options, ...]:
    """The options of each piece, and where blocks follow one another those that hold nothing of what passes.

    What the block before made for a block alone counts as kept by the block from then on. `accumulating` are for each
    piece the parameters with a gradient when its backward begins; `known` footprints that were measured before.
    """
    joints = find_joints(found, program, options)
    made = list(options)
    for stack in stacks_of(joints):
        ahead = [number for number in stack if found.pieces[number].call is None]  # a part of the graph around
        blocks = stack[len(ahead) :]
        sizes = [_bytes(found, joints.get(one)) for one in blocks]
        for place, number in enumerate(blocks):
            if number not in joints:
                continue
            joined = _Joined(found, number, joints[number], options)
            # What the block before was given is held then: no run goes further back than that.
            each = [] if place and place % 2 == 0 else joined.for_each(accumulating[number], stage, known)
            ways = {ONCE: joined.once(), EACH: each}
            choices = joined.holding()
            for length, first in _groupings(len(blocks), bool(ahead)):
                choices += _in_groups(ways, place, length, first, sizes)
            points, footprints = zip(*choices, strict=True)
            made[number] = replace(options[number], points=points, footprints=footprints)
    return tuple(made)


def _bytes(found: Outline, joint: Joint | None) -> int:
    return 0 if joint is None else sum(found.passing[value].bytes for value in joint.values)


def _in_groups(
    ways: Mapping[str, list[Choice]], place: int, length: int, first: str, sizes: Sequence[int]
) -> Iterator[Choice]:
    """The choices of a block at a place of its stack, for groups of so many blocks. `sizes` are of what is passed to
    each block; what is made again once for the blocks before it in its group is there beside its own."""
    start = place - place % length
    if place == start and place:  # the first of a group holds what it is given
        return
    there = sum(sizes[start + 1 : place]) + (sizes[0] if place and not start and first == ONCE else 0)
    for way in (ONCE, EACH) if place else (first,):
        for point, footprint in ways[way]:
            yield point, replace(footprint, backward=footprint.backward + there, group=(length, first))


def _groupings(blocks: int, ahead: bool) -> list[tuple[int, str]]:
    """The ways to group a stack: pairs, and about the square root of the depth; with something `ahead` of the first
    block, what becomes of what is passed to that."""
    lengths = dict.fromkeys((2, max(2, math.isqrt(blocks))))
    return [*itertools.product(lengths, (ONCE, EACH) if ahead and blocks <= FEW else (ONCE,))]


class _Joined:
    """A block that is given something by the block before."""

    def __init__(self, found: Outline, number: int, joint: Joint, options: Sequence[Options]) -> None:
        self.found = found
        self.piece = found.pieces[number]
        self.joint = joint
        self.options = options[number]
        self.maker = found.pieces[joint.maker]
        self.all_options = options

    @property
    def again_seconds(self) -> float:
        """Of running the block before once more, for its results alone."""
        nodes = self.maker.kind.profile.nodes if self.maker.kind.profile else ()
        return sum(node.seconds + STEP_SECONDS for node in nodes)

    def holding(self) -> list[Choice]:
        """The options there are, with what passes counted as the block's own."""
        pairs = zip(self.options.points, self.options.footprints, strict=True)
        return [(point, self._counted(footprint, self.held_bytes(footprint))) for point, footprint in pairs]

    def once(self) -> list[Choice]:
        """Options where what passes is made again when the backward comes to the group, and is there from then on."""
        found: list[Choice] = []
        given = sum({value: self.found.passing[value].grad_bytes for value in self.piece.outputs}.values())
        running = min(footprint.forward for footprint in self.all_options[self.joint.maker].footprints)
        for point, footprint in zip(self.options.points, self.options.footprints, strict=True):
            held = self.held_bytes(footprint)
            if point is None or not held:
                continue
            sweeping = footprint.kept + given + running
            again = replace(
                self._counted(footprint, self._start_bytes),
                backward=max(footprint.backward, sweeping) + held + self._start_bytes,
                seconds=footprint.seconds + self.again_seconds,
            )
            found.append((replace(point, passing=ONCE), again))
        return found

    def for_each(self, accumulating: tuple[str, ...], stage: Stage, known: dict[Hashable, Footprint]) -> list[Choice]:
        """Options where what passes is made again each time it is asked for."""
        maker = self._as_maker()
        if maker is None:
            return []
        pairs = [
            (point, footprint)
            for point, footprint in zip(self.options.points, self.options.footprints, strict=True)
            if point is not None and self.held_bytes(footprint) * LARGE >= footprint.backward
        ]
        found: list[Choice] = []
        for point, _ in sorted(pairs, key=lambda pair: pair[1].backward)[:LOWEST]:
            key = (self.maker.kind.key, self.piece.kind.key, accumulating, point)
            if key not in known:
                known[key] = measure(self.piece.kind, point, stage, accumulating, maker)
            found.append((replace(point, passing=EACH), self._counted(known[key], self._start_bytes)))
        return found

    def held_bytes(self, footprint: Footprint) -> int:
        """What an option holds of what passes."""
        pairs = zip(self.piece.inputs, footprint.holds_inputs, strict=False)
        held = {value for value, holds in pairs if holds} & {*self.joint.values}
        return sum(self.found.passing[value].bytes for value in held)

    @property
    def _start_bytes(self) -> int:
        """Held so that the block before can run again: what it is given, if no piece up to it holds that whatever it
        keeps, and the state of the generator."""
        passing = self.found.passing
        given = [value for value in dict.fromkeys(self.maker.inputs) if passing[value].maker is not None]
        alone = [value for value in given if not any(self._always_holds(one, value) for one in passing[value].readers)]
        efforts = self.maker.kind.profile.efforts.values() if self.maker.kind.profile else ()
        state = RANDOM_STATE_BYTES if any(effort.drawn for effort in efforts) else 0
        return state + sum(passing[value].bytes for value in alone)

    def _always_holds(self, reader: int, value: int) -> bool:
        """Whether a piece that runs no later than the block before holds what it is given under every option."""
        places = [place for place, read in enumerate(self.found.pieces[reader].inputs) if read == value]
        return reader <= self.joint.maker and all(
            any(footprint.holds_inputs[place] for place in places if place < len(footprint.holds_inputs))
            for footprint in self.all_options[reader].footprints
        )

    def _counted(self, footprint: Footprint, held_bytes: int) -> Footprint:
        """The footprint with what passes as its own: so many bytes of it are held."""
        pairs = zip(self.piece.inputs, footprint.holds_inputs, strict=False)
        return replace(
            footprint,
            kept=footprint.kept + held_bytes,
            backward=footprint.backward + held_bytes,
            holds_inputs=tuple(holds and value not in self.joint.values for value, holds in pairs),
        )

    def _as_maker(self) -> Maker | None:
        """The block before as what runs again; None if what it gives comes in another form."""
        results, inputs = self.maker.kind.results, self.piece.kind.inputs
        if (len(results), len(inputs)) != (len(self.maker.outputs), len(self.piece.inputs)):  # tuples among them
            return None
        passes = [
            (result, number)
            for number, read in enumerate(self.piece.inputs)
            for result, value in enumerate(self.maker.outputs)
            if value == read and value_text(results[result]) == value_text(inputs[number])
        ]
        alike = {self.piece.inputs[number] for _, number in passes} >= {*self.joint.values}
        return Maker(self.maker.kind, tuple(passes), self.again_seconds) if alike else None
