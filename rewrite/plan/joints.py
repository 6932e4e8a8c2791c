"""Where blocks follow one another so that what passes from one to the next can be made again by running the first."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rewrite.capture.captured import fills_late, is_graded
from rewrite.emit.planned import changes_buffers, written_buffers
from rewrite.plan.options import Options
from rewrite.plan.outline import Outline, Piece
from rewrite.plan.rerun import ROUTING, changes_mode, function_name, is_effect
from rewrite.plan.settled import spot_of
from rewrite.program import Program
from rewrite.tags import RECOMPUTE


@dataclass(frozen=True)
class Joint:
    """Where a block is given something that the block before made for it alone."""

    maker: int
    """Number of the piece before."""
    values: tuple[int, ...]
    """Numbers of those passing values."""


def find_joints(found: Outline, program: Program, options: Sequence[Options]) -> dict[int, Joint]:
    """For each block that may have what passes to it made again, by number, what that is."""
    runs = Counter((piece.region, piece.instance, piece.names) for piece in found.pieces)
    views = {number for number, piece in enumerate(found.pieces) if not piece.computes}
    computing = [number for number in range(len(found.pieces)) if number not in views]
    joints: dict[int, Joint] = {}
    for maker, number in itertools.pairwise(computing):
        one, other = found.pieces[maker], found.pieces[number]
        if runs[other.region, other.instance, other.names] > 1 or runs[one.region, one.instance, one.names] > 1:
            continue
        if not _follow(one, other, program) or not _runs_again(one, program) or found.written_later(maker):
            continue
        holds = {
            value
            for footprint in options[maker].footprints
            for value, held in zip(one.outputs, footprint.holds_results, strict=False)
            if held
        }
        if one.call is None and (holds or len(options[maker].points) > 1):
            continue  # in a group, what it keeps of its own would go with the rest
        passed = dict.fromkeys(value for value in other.inputs if found.passing[value].maker == maker)
        alone = [value for value in passed if {*found.passing[value].readers} - views == {number}]
        if values := tuple(value for value in alone if value not in holds):
            joints[number] = Joint(maker, values)
    return joints


def _follow(one: Piece, other: Piece, program: Program) -> bool:
    """Whether `other` is a block that writes to nothing it is given, and `one` a block or a part of the graph that
    calls it, without hooks on them and with nothing between but views."""
    if other.call is None:
        return False
    (here, names), (there, call) = spot_of(one).around, spot_of(other).around
    around = program.regions[here]
    if here != there or len(around.instances) > 1 or program.regions[other.region].mutated_inputs:
        return False
    nodes = list(around.nodes())
    places = [place for place, node in enumerate(nodes) if node.name in (*names, *call)]
    if any(nodes[place].meta.get("hooked") or RECOMPUTE in nodes[place].meta for place in places):
        return False
    if changes_buffers(around, [nodes[place] for place in places]):
        return False
    between = nodes[places[0] : places[-1]]
    return not any(changes_mode(node) or is_effect(node) or node.meta.get("writes") for node in between)


def _runs_again(piece: Piece, program: Program) -> bool:
    """Whether a piece may be run again as a whole and gives the same."""
    region = program.regions[piece.region]
    own = [node for node in region.nodes() if piece.call is not None or node.name in piece.names]
    number, names = spot_of(piece).around
    around = [node for node in program.regions[number].nodes() if node.name in names]
    if piece.kind.profile is None or piece.once or region.mutated_inputs or written_buffers(region, own):
        return False
    if written_buffers(program.regions[number], around):
        return False
    if piece.call is None and any(node.meta.get("writes") for node in own):
        return False
    return not any(
        function_name(node) in ROUTING or changes_mode(node) or is_effect(node) or fills_late(node) or is_graded(node)
        or node.meta.get("object") or node.kwargs.get("generator") is not None
        for node in own
    )  # fmt: skip


def stacks_of(joints: Mapping[int, Joint]) -> list[list[int]]:
    """Blocks that follow one another, by number."""
    stacks: list[list[int]] = []
    for number, joint in sorted(joints.items()):
        if stacks and stacks[-1][-1] == joint.maker:
            stacks[-1].append(number)
        else:
            stacks.append([joint.maker, number])
    return stacks
