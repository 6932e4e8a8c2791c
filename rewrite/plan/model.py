"""A program as a chain of pieces with their options: all that the choice of what to keep goes by."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from rewrite.errors import RewriteError
from rewrite.memory.rates import Rates
from rewrite.memory.timeline import Estimate
from rewrite.plan.calibrate import node_seconds
from rewrite.plan.chain import Chain, Link, Value
from rewrite.plan.curve import Point, curve
from rewrite.plan.measure import Footprint, measure
from rewrite.plan.options import Options
from rewrite.plan.outline import Kind, Outline, Piece, outline
from rewrite.plan.passing import with_passing
from rewrite.plan.price import SEGMENT_SECONDS, step_seconds
from rewrite.plan.release import releasing
from rewrite.plan.stage import Stage, staged
from rewrite.program import Program

ALWAYS_THERE = ("parameter", "buffer", "input", "optimizer")
"""Categories of an estimate whose bytes are alive through the whole step."""


@dataclass
class Known:
    """What has been found of pieces by kind, for one device, its rates and one model; programs of it may share it."""

    kinds: dict[str, Kind] = field(default_factory=dict)
    plain: dict[str, Footprint] = field(default_factory=dict)
    """Of pieces that run as they are."""
    options: dict[str, Options] = field(default_factory=dict)
    accumulating: dict[tuple[str, tuple[str, ...]], Options] = field(default_factory=dict)
    """The same of pieces some of whose parameters have gradients from later pieces when their backward begins."""
    passed: dict[Hashable, Footprint] = field(default_factory=dict)
    """Of pieces that have what passes to them made again for each use."""

    def options_of(self, kind: Kind, accumulating: tuple[str, ...], stage: Stage) -> Options:
        """What pieces of this kind can keep: the same points whether their parameters have gradients or not."""
        found = self.options[kind.key]
        if not accumulating or kind.profile is None:
            return found
        key = (kind.key, accumulating)
        if key not in self.accumulating:
            again = [measure(kind, point, stage, accumulating) for point in found.points]
            priced = [replace(each, seconds=one.seconds) for each, one in zip(again, found.footprints, strict=True)]
            self.accumulating[key] = replace(found, footprints=tuple(priced))
        return self.accumulating[key]

    def plain_footprint(self, kind: Kind, stage: Stage) -> Footprint:
        """What a piece of this kind takes as it is."""
        if kind.key not in self.plain:
            self.plain[kind.key] = Footprint() if kind.profile is None else measure(kind, None, stage)
        return self.plain[kind.key]

    def near(self, one: Outline, other: Outline, slack_bytes: int, stage: Stage) -> bool:
        """Whether no piece of `other` takes less than that of `one` as they are, but for so many bytes altogether."""
        if len(one.pieces) != len(other.pieces):
            return False
        pairs = [
            tuple(self.plain_footprint(piece.kind, stage) for piece in pieces)
            for pieces in zip(one.pieces, other.pieces, strict=True)
        ]
        return sum(mine.kept - its.kept for mine, its in pairs) <= slack_bytes and all(
            mine.forward - its.forward <= slack_bytes and mine.backward - its.backward <= slack_bytes
            for mine, its in pairs
        )


@dataclass(frozen=True)
class PlanModel:
    """The pieces of a program in order, what each can keep, and the chain they form."""

    pieces: tuple[Piece, ...]
    options: tuple[Options, ...]
    chain: Chain

    @property
    def step_seconds(self) -> float:
        """Of the forward and backward of all pieces as they are."""
        return sum(options.step_seconds for options in self.options)

    def points(self, choice: Sequence[int]) -> tuple[Point | None, ...]:
        """What each piece keeps under a choice of options."""
        return tuple(options.points[option] for options, option in zip(self.options, choice, strict=True))


def plan_model(
    program: Program,
    root: nn.Module,
    before: Estimate,
    device: str,
    rates: Rates,
    *,
    calibrate: bool = False,
    known: Known | None = None,
) -> PlanModel:
    """Profile, curve and footprints of each kind of piece of `program`, those that are not in `known` yet.

    `before` is the estimate of the program without tags.
    """
    (found,) = plan_models([program], root, before, device, rates, calibrate=calibrate, known=known)
    return found


def plan_models(
    programs: Sequence[Program],
    root: nn.Module,
    before: Estimate,
    device: str,
    rates: Rates,
    *,
    calibrate: bool = False,
    known: Known | None = None,
) -> list[PlanModel]:
    """The same for several programs of one model, `before` being the estimate of one of them.

    It tells the bytes of parameters, inputs and optimizer, and the peak of the optimizer's step.
    """
    known = known or Known()
    with staged(root, device) as stage:
        outlines = [outline(program, stage, rates, known.kinds) for program in programs]
    keys = dict.fromkeys(piece.kind.key for found in outlines for piece in found.pieces)
    new = [known.kinds[key] for key in keys if key not in known.options]
    if calibrate:
        new = [_calibrated(kind) for kind in new]
    with staged(root, device) as stage:
        known.options.update({kind.key: _options(kind, stage, rates, known) for kind in new})
        pairs = zip(outlines, programs, strict=True)
        return [_model(found, program, known, root, before, stage) for found, program in pairs]


def _model(
    found: Outline, program: Program, known: Known, root: nn.Module, before: Estimate, stage: Stage
) -> PlanModel:
    gradients, accumulating = _gradients_left(found, root)
    pairs = zip(found.pieces, accumulating, strict=True)
    plain = [
        _without(found.written_later(number), piece, known.options_of(piece.kind, paths, stage))
        for number, (piece, paths) in enumerate(pairs)
    ]
    options = with_passing(found, program, plain, accumulating, stage, known.passed)
    constant = sum(before.by_category[category] for category in ALWAYS_THERE)
    chain = Chain(
        _links(found, options),
        tuple(
            Value(each.bytes, each.grad_bytes, each.maker, tuple(each.readers), _last_grad_bytes(place, found, options))
            for place, each in enumerate(found.passing)
        ),
        constant,
        before.phases.get("optimizer", 0),
        gradients,
    )
    return PlanModel(tuple(found.pieces), options, chain)


def _without(values: set[int], piece: Piece, options: Options) -> Options:
    """The options of a piece that run nothing again from `values`, which are passed to it and written to later."""
    left = [
        place
        for place, footprint in enumerate(options.footprints)
        if place == 0 or values.isdisjoint(itertools.compress(piece.inputs, footprint.holds_inputs))
    ]
    points, footprints = [options.points[place] for place in left], [options.footprints[place] for place in left]
    return replace(options, points=tuple(points), footprints=tuple(footprints))


def _last_grad_bytes(place: int, found: Outline, options: Sequence[Options]) -> int:
    """Of the storage behind the gradient that the last reader of a passing value gives for it."""
    last = max(found.passing[place].readers, default=None)
    if last is None:
        return 0
    pairs = zip(found.pieces[last].inputs, options[last].footprints[0].gradients, strict=False)
    return max((given for value, given in pairs if value == place), default=0)


def _calibrated(kind: Kind) -> Kind:
    if kind.profile is None:
        return kind
    return replace(kind, profile=kind.profile.priced(node_seconds(kind)))


def _options(kind: Kind, stage: Stage, rates: Rates, known: Known) -> Options:
    points: list[Point | None] = [None]
    footprints = [known.plain_footprint(kind, stage)]
    if kind.profile is not None and footprints[0].kept:
        for point in curve(kind.profile):
            for each in (point, *releasing(kind.profile, point)):
                try:
                    found = measure(kind, each, stage)
                except RewriteError:  # what cannot be run again, for whatever reason, is not
                    continue
                again = found.seconds + SEGMENT_SECONDS * len(kind.profile.nodes)
                points.append(each)
                footprints.append(replace(found, seconds=again))
    kept = [place for place in range(len(points)) if not _worse(place, footprints)]
    seconds = step_seconds(footprints[0].work, rates)
    return Options(tuple(points[place] for place in kept), tuple(footprints[place] for place in kept), seconds)


def _worse(place: int, footprints: Sequence[Footprint]) -> bool:
    """Whether another option takes no more of anything, and less of something or stands before."""
    if place == 0:
        return False
    mine = _measures(footprints[place])
    others = [(other, _measures(footprints[other])) for other in range(len(footprints)) if other != place]
    return any(
        all(one <= two for one, two in zip(each, mine, strict=True)) and (each != mine or other < place)
        for other, each in others
    )


def _measures(footprint: Footprint) -> tuple[float, ...]:
    return (
        footprint.kept, footprint.forward, footprint.backward, footprint.seconds,
        *footprint.holds_inputs, *footprint.holds_results,
    )  # fmt: skip


def _links(found: Outline, options: Sequence[Options]) -> tuple[Link, ...]:
    runs = Counter((piece.region, piece.instance, piece.names) for piece in found.pieces)
    links = []
    for piece, option in zip(found.pieces, options, strict=True):
        several = runs[piece.region, piece.instance, piece.names] > 1
        tied = f"{piece.region}:{piece.instance}:{piece.names[0]}" if several else None
        links.append(Link(option.footprints, piece.inputs, piece.outputs, tied))
    return tuple(links)


def _gradients_left(found: Outline, root: nn.Module) -> tuple[tuple[int, ...], list[tuple[str, ...]]]:
    """For each piece the bytes of the parameter gradients that the pieces after it have made, and which of its own
    parameters these are of, by path below its module."""
    left, accumulating, seen, total = [], [], set[int](), 0
    for piece in reversed(found.pieces):
        left.append(total)
        own = dict(_parameters(piece, root.get_submodule(piece.instance)))
        accumulating.append(tuple(path for path, parameter in own.items() if id(parameter) in seen))
        for parameter in own.values():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                total += parameter.numel() * parameter.itemsize
    return tuple(reversed(left)), accumulating[::-1]


def _parameters(piece: Piece, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Those that the piece reads and that are trained, by path."""
    for node in piece.kind.graph.nodes:
        path = str(node.target)
        if node.op == "call_module":
            named = module.get_submodule(path).named_parameters(path)
            yield from ((name, parameter) for name, parameter in named if parameter.requires_grad)
        elif node.op == "get_attr":
            found = operator.attrgetter(path)(module)
            if isinstance(found, nn.Parameter) and found.requires_grad:
                yield path, found
