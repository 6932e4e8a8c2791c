"""What a piece holds and needs while it runs, found by running it: forward and backward, on fakes, with its tags."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rewrite.emit.code import compile_graph
from rewrite.emit.segments import fold_segments
from rewrite.memory.timeline import Work
from rewrite.memory.tracker import Storage, Tracker
from rewrite.memory.work import Tally
from rewrite.plan.curve import Point
from rewrite.plan.outline import Kind
from rewrite.plan.rerun import ONCE
from rewrite.plan.stage import Stage
from rewrite.plan.tagging import tag
from rewrite.program import Region, copy_graph, value_tensors
from rewrite.recompute import nesting
from rewrite.recompute.forward import run_recorded
from rewrite.recompute.passing import Passage, Passing
from rewrite.recompute.plan import Plan, Step


@dataclass(frozen=True)
class Footprint:
    """Bytes of one run of a piece, without its inputs and, in the forward, its results: these pass between pieces."""

    kept: int = 0
    """Held from the forward to the backward."""
    forward: int = 0
    """The most within the forward."""
    backward: int = 0
    """The most within the backward: what is kept, results that the piece holds itself, and the gradients of results,
    inputs and parameters."""
    holds_inputs: tuple[bool, ...] = ()
    """For each tensor the piece is given whether its storage is held for the backward."""
    holds_results: tuple[bool, ...] = ()
    """The same for each tensor it returns."""
    gradients: tuple[int, ...] = ()
    """For each tensor it is given the bytes of the storage behind the gradient that it gives back; 0 for none."""
    seconds: float = 0.0
    """Of what the backward computes again."""
    group: tuple[int, str] | None = None
    """In what groups of blocks in a row, between which nothing is held, the option has its place: how many each has,
    and what becomes of what is passed to the first. None for any plan; a plan takes options of one way to group."""
    work: tuple[Work, ...] = ()
    """The operators of forward and backward."""


@dataclass(frozen=True)
class Maker:
    """The piece before, which runs again whenever a piece asks for what that passed to it."""

    kind: Kind
    passes: tuple[tuple[int, int], ...]
    """Numbers of its results, each with that of the input that it becomes."""
    seconds: float
    """Of running it again."""


def measure(
    kind: Kind, point: Point | None, stage: Stage, accumulating: Iterable[str] = (), maker: Maker | None = None
) -> Footprint:
    """The footprint of pieces of this kind that keep what `point` says, or run as they are for None.

    Parameters of the kind's module at the paths in `accumulating` have a gradient when the backward begins. With a
    `maker` what it passes is not held, and made again for each use.
    """
    graph = copy_graph(kind.graph)
    if point is not None:
        once = {node.name for node in graph.nodes if node.meta.get(ONCE)}
        tag(graph.nodes, {node.name for node in graph.nodes}, point, 0, once)
    region = Region("", ("",), type(kind.module).__name__, graph, written_buffers=kind.written_buffers)
    function = compile_graph(fold_segments(region), "piece")
    passed = None if maker is None else _Passed(maker, function)
    run = _Run(kind, passed or function, stage)
    there = [] if passed is None else value_tensors(passed.inputs)
    footprint = run.footprint([kind.module.get_parameter(path) for path in accumulating], there)
    seconds = 0.0 if point is None else point.seconds
    return replace(footprint, seconds=seconds + (0.0 if passed is None else passed.runs * passed.maker.seconds))


class _Passed:
    """The function of a piece within a segment that makes again what passes to it."""

    def __init__(self, maker: Maker, function: Callable[..., tuple[Any, ...]]) -> None:
        self.maker = maker
        self.function = function
        self.again = compile_graph(copy_graph(maker.kind.graph), "piece")
        self.inputs = [_fresh(value) for value in maker.kind.inputs]
        self.runs = 0

    def __call__(self, module: nn.Module, *given: Any) -> tuple[Any, ...]:
        place = len(self.inputs)
        results = [None] * len(self.maker.kind.results)
        for result, number in self.maker.passes:
            results[result] = given[number]

        def recorded(module: nn.Module, run: Passage, *inputs: Any) -> tuple[Any, ...]:
            run.made(place, tuple(results))
            with nesting.block(run, []):
                return self.function(module, *given)

        step = Step(self._run_again, tuple(range(place)), (False,) * place)
        nothing, each = frozenset[int](), frozenset((place,))
        plan = Plan("", self.function, recorded, {place: step}, nothing, each, lambda _: (), each, passing=True)
        return run_recorded(Passage(Passing(plan, module, self.inputs), self.inputs), self.inputs)

    def _run_again(self, _: nn.Module, *inputs: Any) -> tuple[Any, ...]:
        self.runs += 1
        results: tuple[Any, ...] = self.again(self.maker.kind.module, *inputs)
        return results


class _Source(torch.autograd.Function):
    """Gives a tensor a history that holds nothing, so that it lives as long as something holds it."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, *geometry: Any) -> torch.Tensor:
        return _empty(*geometry)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        return (None,) * 4


def _empty(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype)


class _Seed(torch.autograd.Function):
    """A number whose backward makes a gradient for each tensor, as the pieces after it would hand them over."""

    @staticmethod
    def forward(ctx: Any, *results: torch.Tensor) -> torch.Tensor:
        ctx.kinds = [(result.shape, result.dtype) for result in results]
        return results[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty(shape, dtype=dtype) for shape, dtype in ctx.kinds)


class _Run:
    def __init__(self, kind: Kind, function: Any, stage: Stage) -> None:
        self.kind = kind
        self.function = function
        self.tally = Tally()
        self.tracker: Tracker = stage.tracker(self.tally)
        self.gradients: dict[int, int] = {}

    def footprint(self, accumulating: Sequence[torch.Tensor], there: Sequence[torch.Tensor] = ()) -> Footprint:
        parameters = [each for each in self.kind.module.parameters() if each.requires_grad]
        for each in accumulating:
            each.grad = torch.empty_like(each)
        given = [_fresh(value) for value in self.kind.inputs]
        watched = [weakref.ref(tensor.untyped_storage()) for tensor in value_tensors(given)]
        self._watch_gradients(value_tensors(given))
        gradients_there = [each.grad for each in accumulating if each.grad is not None]
        module = self.kind.module
        own = [*module.parameters(), *module.buffers()]
        outside = self._outside([*own, *there, *gradients_there, *value_tensors(given)])
        with torch.enable_grad(), self.tracker:
            returned = self.function(self.kind.module, *given)
            tensors = value_tensors(list(returned))
            results = [self.tracker.owner(tensor) for tensor in tensors]
            going_on = [value for value, passes in zip(returned, self.kind.passes_on, strict=True) if passes]
            differentiable = [each for each in value_tensors(going_on) if each.requires_grad]
            loss = _Seed.apply(*differentiable) if differentiable else None  # type: ignore[no-untyped-call]
            ended = len(self.tracker.events)
            del returned, tensors, going_on, differentiable, given
            holds_inputs = tuple(reference() is not None for reference in watched)
            holds_results = tuple(result is not None and result.alive for result in results)
            outside.add(id(self._owner(loss)))
            passing = outside | {id(result) for result in results}
            kept = _bytes(self.tracker.alive(), passing)
            held = _bytes(self.tracker.alive(), outside)
            forward = _highest(self.tracker.events[:ended], passing)
            started = len(self.tracker.events)
            if loss is not None:
                loss.backward()
        backward = held + _highest(self.tracker.events[started:], outside)
        for each in parameters:
            each.grad = None
        gradients = tuple(self.gradients.get(place, 0) for place in range(len(watched)))
        return Footprint(kept, forward, backward, holds_inputs, holds_results, gradients, work=self.tally.work())

    def _watch_gradients(self, tensors: Sequence[torch.Tensor]) -> None:
        def note(gradient: torch.Tensor, place: int) -> None:
            self.gradients[place] = gradient.untyped_storage().nbytes()

        for place, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(note, place=place))

    def _outside(self, there: Sequence[torch.Tensor]) -> set[int]:
        """Identities of the records of storages that are there before the run."""
        for tensor in there:
            self.tracker.hold(tensor, "input")
        return {id(self.tracker.owner(tensor)) for tensor in there}

    def _owner(self, tensor: torch.Tensor | None) -> Storage | None:
        return None if tensor is None else self.tracker.owner(tensor)


def _fresh(value: Any) -> Any:
    """Inputs of the run's own, not leaves: the step around it would hold a leaf, but not a value that passes."""

    def leaf(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        geometry = (tensor.shape, tensor.stride(), tensor.dtype)
        if not tensor.requires_grad:
            return _empty(*geometry)
        anchor = torch.empty((), requires_grad=True)
        with torch.enable_grad():
            return _Source.apply(anchor, *geometry)  # type: ignore[no-untyped-call]

    return torch.utils._pytree.tree_map(leaf, value)


def _bytes(storages: Sequence[Storage], left_out: set[int]) -> int:
    return sum(storage.bytes for storage in storages if id(storage) not in left_out)


def _highest(events: Sequence[tuple[Storage, int, str]], left_out: set[int]) -> int:
    level = highest = 0
    for storage, change, _ in events:
        if id(storage) in left_out:
            continue
        level += change
        highest = max(highest, level)
    return highest
