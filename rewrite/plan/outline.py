"""A program as the pieces that a step runs, one after another, and the values that pass between them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from rewrite import calls
from rewrite.memory.rates import Rates
from rewrite.plan.matching import Held, aligned, anew, takes
from rewrite.plan.pieces import extract, graph_key, module_text, narrow_cuts, value_text
from rewrite.plan.profile import Profile, profile_graph
from rewrite.plan.rerun import changes_mode, is_effect
from rewrite.plan.stage import Stage, example
from rewrite.program import Program, Region, value_tensors


@dataclass(frozen=True)
class Kind:
    """What pieces with equal graphs, layers and inputs share. `graph` and `inputs` are those of the first of them."""

    key: str
    graph: fx.Graph
    module: nn.Module
    inputs: tuple[Any, ...]
    """Fakes for the graph's placeholders."""
    profile: Profile | None
    """None for a piece that cannot be run on fakes by itself: it stays as it is."""
    results: tuple[Any, ...]
    """What the graph returned."""
    passes_on: tuple[bool, ...]
    """For each result whether something goes on from it: a later piece, or, from the loss, the backward."""
    written_buffers: tuple[str, ...] = ()
    """Of the region that the first of them is of, by path below the module."""


class Call(NamedTuple):
    """A node that calls a block."""

    region: int
    """Number of the region around."""
    name: str


@dataclass(frozen=True)
class Piece:
    """One run of a part of a region's graph."""

    region: int
    """Number of the region in the program."""
    instance: str
    names: tuple[str, ...]
    """The nodes of the region's graph that it consists of."""
    once: frozenset[str]
    """Those of them that must not be run again."""
    kind: Kind
    inputs: tuple[int, ...]
    """The `Passing` values that the tensors it reads lie in, by number."""
    outputs: tuple[int, ...]
    """The same for the tensors it returns."""
    call: Call | None = None
    """Of a block that is one piece: where it is called."""

    @functools.cached_property
    def computes(self) -> bool:
        """Whether it does anything but make views."""
        profile = self.kind.profile
        return profile is None or bool(profile.nodes) or any(map(_acts, self.kind.graph.nodes))


@dataclass
class Passing:
    """A storage that passes from one piece to others."""

    bytes: int
    grad_bytes: int
    """Of the gradient of it, 0 where it needs none."""
    maker: int | None
    """Number of the piece that makes it; None for an input of the model."""
    readers: list[int] = field(default_factory=list)
    written: int = -1
    """Number of the last piece that changes it in place; -1 for none."""


@dataclass
class Outline:
    """The pieces in the order in which a forward runs them."""

    pieces: list[Piece] = field(default_factory=list)
    passing: list[Passing] = field(default_factory=list)
    kinds: dict[str, Kind] = field(default_factory=dict)

    def written_later(self, number: int) -> set[int]:
        """Of the values that a piece is given, those that a later one changes in place."""
        return {value for value in self.pieces[number].inputs if self.passing[value].written > number}


def outline(program: Program, stage: Stage, rates: Rates, kinds: dict[str, Kind] | None = None) -> Outline:
    """Walk the program from its first region, the root, and profile each kind of piece that is not in `kinds` yet.

    Without a graph for the root, every block stands by itself.
    """
    walk = _Walk(program, stage, rates)
    if kinds is not None:
        walk.found.kinds = kinds
    if program.regions and not program.regions[0].path:
        walk.enter(program.regions[0], "", None)
        return walk.found
    for path, region in serving(program).items():
        walk.enter(region, path, None)
    return walk.found


def serving(program: Program) -> dict[str, Region]:
    """The region that each instance runs in the captured call; a block may have several."""
    found: dict[str, Region] = {}
    for region in program.regions:
        for path in region.instances:
            if path not in found or (_ran(region, path) and not _ran(found[path], path)):
                found[path] = region
    return found


def _ran(region: Region, path: str) -> bool:
    return path in getattr(region.captured, "instances", (region.path,))


def _acts(node: fx.Node) -> bool:
    """Whether a node does something beside what it returns."""
    return bool(node.meta.get("writes") or node.meta.get("random"))


class _Walk:
    def __init__(self, program: Program, stage: Stage, rates: Rates) -> None:
        self.stage = stage
        self.rates = rates
        self.program = program
        self.regions = serving(program)
        self.numbered = {id(region): number for number, region in enumerate(program.regions)}
        self.opaque = {entry.path for entry in program.opaque}
        self.found = Outline()
        self.numbers: dict[int, int] = {}
        """Storage -> number of the passing value."""
        self.held: list[Any] = []
        """Every tensor that passes, so that each storage stays its own."""
        self.extracted: dict[Hashable, tuple[Kind, tuple[fx.Node, ...]]] = {}
        """What was found of the same nodes in another instance of a region with equal layers and inputs."""
        self.layers: dict[str, str] = {}
        """Instance -> its layers as text."""

    def enter(self, region: Region, instance: str, given: Sequence[Any] | None, call: Call | None = None) -> list[Any]:
        """The pieces of one run of a region, called from `call`; returns the leaves of its result."""
        values: dict[fx.Node, Any] = {}
        placeholders = [node for node in region.graph.nodes if node.op == "placeholder"]
        for place, node in enumerate(placeholders):
            value = example(node.meta.get("val")) if given is None else given[place]
            values[node] = Held() if node.meta.get("object") else value
            self._number(values[node], maker=None)
        calls_inside = {node: path for node in region.graph.nodes if (path := self._called(region, instance, node))}
        whole = not calls_inside and bool(instance)
        waiting: list[fx.Node] = []
        for node in region.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                self._close(region, instance, waiting, values, whole=whole, call=call)
                return [_value(leaf, values) for leaf in node.args[0]]
            if node in calls_inside:
                self._close(region, instance, waiting, values)
                call = Call(self.numbered[id(region)], node.name)
                values[node] = self._call(calls_inside[node], node, values, call)
            elif is_effect(node) or node.meta.get("object"):
                values[node] = Held()
            else:
                waiting.append(node)
        return []

    def _called(self, region: Region, instance: str, node: fx.Node) -> str | None:
        """The path of the instance that a node calls, if it has a graph."""
        if node.op != "call_module":
            return None
        path = f"{instance}.{node.target}".lstrip(".")
        return path if path in self.regions and path not in self.opaque else None

    def _call(self, path: str, node: fx.Node, values: Mapping[fx.Node, Any], call: Call) -> Any:
        around = path.removesuffix(str(node.target)).rstrip(".")
        arguments = fx.map_arg((node.args, node.kwargs), lambda each: self._given(each, around, values))
        given = calls.split(arguments).leaves
        region = self._serving_call(path, given)
        returned = self.enter(region, path, aligned(region, given), call)
        captured = region.captured
        return returned[0] if captured is None else calls.join(captured.result, returned)

    def _given(self, node: fx.Node, instance: str, values: Mapping[fx.Node, Any]) -> Any:
        """The value of a node; of one that reads a weight or a buffer of the instance, that."""
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.stage.root.get_submodule(instance))
        return values.get(node)

    def _note_writes(
        self, region: Region, instance: str, nodes: Sequence[fx.Node], values: Mapping[fx.Node, Any], number: int
    ) -> None:
        """Note which passing values the piece of this number, of these nodes, changes in place."""
        by_name = {node.name: node for node in region.graph.nodes}
        names = [name for node in nodes for name in node.meta.get("writes", ())]
        changed = [by_name[name] for name in (*names, *region.mutated_inputs) if name in by_name]
        for tensor in value_tensors([self._given(node, instance, values) for node in changed]):
            known = self.numbers.get(tensor.untyped_storage()._cdata)
            if known is not None:
                self.found.passing[known].written = number

    def _serving_call(self, path: str, given: list[Any]) -> Region:
        """The region for a call: of those that serve the instance, the one that was captured with such tensors."""
        for region in self.program.regions:
            if path in region.instances and takes(region, given):
                return region
        return self.regions[path]

    def _close(
        self,
        region: Region,
        instance: str,
        waiting: list[fx.Node],
        values: dict[fx.Node, Any],
        *,
        whole: bool = False,
        call: Call | None = None,
    ) -> None:
        """Make pieces of the nodes seen since the last call: one of all of them, for a block."""
        nodes = list(waiting)
        waiting.clear()
        for part in [nodes] if whole else narrow_cuts(nodes):
            if part:
                self._piece(region, instance, part, values, call if whole else None)

    def _piece(
        self, region: Region, instance: str, nodes: list[fx.Node], values: dict[fx.Node, Any], call: Call | None
    ) -> None:
        inside = set(nodes)
        returned = [node for node in nodes if node.op != "get_attr" and any(user not in inside for user in node.users)]
        once = frozenset(node.name for node in self._once(instance, nodes))
        kind, sources = self._extracted(region, instance, nodes, values, returned, once)
        inputs = tuple(values[node] for node in sources)
        number = len(self.found.pieces)
        results = anew(kind.inputs, kind.results, inputs)
        values.update(zip(returned, results, strict=True))
        reads = tuple(place for value in inputs for place in self._number(value, None))
        makes = tuple(place for value in results for place in self._number(value, number))
        for place in dict.fromkeys(reads):
            self.found.passing[place].readers.append(number)
        self._note_writes(region, instance, nodes, values, number)
        names = tuple(node.name for node in nodes)
        self.found.pieces.append(Piece(self.numbered[id(region)], instance, names, once, kind, reads, makes, call))

    def _extracted(
        self,
        region: Region,
        instance: str,
        nodes: list[fx.Node],
        values: Mapping[fx.Node, Any],
        returned: list[fx.Node],
        once: frozenset[str],
    ) -> tuple[Kind, tuple[fx.Node, ...]]:
        """The kind of a piece, and the nodes that give its inputs."""
        module = self.stage.root.get_submodule(instance)
        if instance not in self.layers:
            self.layers[instance] = module_text(module)
        inside = set(nodes)
        outside = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
        given = tuple(value_text(values.get(node)) for node in outside)
        alike = (nodes[0], nodes[-1], once, self.layers[instance], given)
        if alike not in self.extracted:
            graph, sources = extract(nodes, values, returned, once)
            inputs = tuple(values[node] for node in sources)
            passes_on = _pass_on(region, returned, inside)
            kind = self._kind(graph, module, inputs, returned, passes_on, region.written_buffers)
            self.extracted[alike] = kind, sources
        return self.extracted[alike]

    def _once(self, instance: str, nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
        for node in nodes:
            opaque = node.op == "call_module" and f"{instance}.{node.target}".lstrip(".") in self.opaque
            if node.meta.get("hooked") or opaque:
                yield node

    def _kind(
        self,
        graph: fx.Graph,
        module: nn.Module,
        inputs: tuple[Any, ...],
        returned: Sequence[fx.Node],
        passes_on: tuple[bool, ...],
        written: tuple[str, ...],
    ) -> Kind:
        key = f"{graph_key(graph, module, inputs)}\n{passes_on}"
        if key in self.found.kinds:
            return self.found.kinds[key]
        profile: Profile | None = None
        results = tuple(example(node.meta.get("val")) for node in returned)
        depths = [*itertools.accumulate(map(changes_mode, graph.nodes))]
        if min(depths) == depths[-1] == 0:  # otherwise a span goes on around blocks, and would after a run
            with contextlib.suppress(Exception):  # what cannot be run by itself, for whatever reason, is left as it is
                profile, results = profile_graph(graph, module, inputs, self.stage, self.rates, passes_on)
        kind = self.found.kinds[key] = Kind(key, graph, module, inputs, profile, results, passes_on, written)
        return kind

    def _number(self, value: Any, maker: int | None) -> list[int]:
        """The numbers of the storages of the tensors in `value`, new ones made by piece `maker`."""
        found = []
        for tensor in value_tensors(value):
            storage = tensor.untyped_storage()
            place = self.numbers.get(storage._cdata)
            grad_bytes = tensor.numel() * tensor.itemsize if tensor.requires_grad else 0
            if place is None:
                place = self.numbers[storage._cdata] = len(self.found.passing)
                self.found.passing.append(Passing(storage.nbytes(), 0, maker))
                self.held.append(tensor)
            passing = self.found.passing[place]
            passing.grad_bytes = max(passing.grad_bytes, grad_bytes)
            found.append(place)
        return found


def _pass_on(region: Region, returned: Sequence[fx.Node], inside: set[fx.Node]) -> tuple[bool, ...]:
    """For each node whether something goes on from its value. Of what the model returns, only the loss does."""
    found = []
    for node in returned:
        outside = [user for user in node.users if user not in inside]
        read = any(user.op != "output" and not is_effect(user) for user in outside)
        ends = any(user.op == "output" for user in outside)
        found.append(read or (ends and (bool(region.path) or _may_be_loss(node, region))))
    return tuple(found)


def _may_be_loss(node: fx.Node, region: Region) -> bool:
    """Whether a node that the model returns is one number, or there is no such to differentiate in its place."""
    leaves = [leaf for each in region.graph.nodes if each.op == "output" for leaf in each.args[0]]
    numbers = [leaf for leaf in leaves if isinstance(leaf, fx.Node) and _is_number(leaf)]
    return _is_number(node) or not numbers


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.requires_grad


def _value(leaf: Any, values: Mapping[fx.Node, Any]) -> Any:
    return values.get(leaf) if isinstance(leaf, fx.Node) else leaf
