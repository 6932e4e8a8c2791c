"""Turn a recompute segment into code that tells of its values as it makes them, and steps that make each again."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from rewrite import runtime
from rewrite.capture.captured import REREADS, fills_late
from rewrite.emit.code import compile_graph, copy_graded
from rewrite.program import Region, value_tensors
from rewrite.recompute.layers import Owners, owners_at
from rewrite.recompute.plan import Place, Plan, Step
from rewrite.tags import KEEP, KEEP_STATE, PASSING, RELEASE

SPANS = (runtime.set_grad_enabled, runtime.enter_autocast, runtime.exit_autocast)
VIEWS = frozenset({
    "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "contiguous",
    "flatten", "unflatten", "t", "mT", "movedim", "swapaxes", "chunk", "split", "unbind", "narrow", "select",
})  # fmt: skip
"""Functions that save nothing for their backward."""


def can_plan(region: Region, group: Sequence[fx.Node], mutated_inputs: Sequence[int]) -> bool:
    """Whether values of the segment can be had one by one. Otherwise it is recomputed whole."""
    if mutated_inputs or changes_buffers(region, group):
        return False
    return not any(_runs_whole(node) or fills_late(node) or node.target in SPANS for node in group)


def plan_segment(
    region: Region, group: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> Plan:
    """The code of a segment, with what is to be kept of it told by its tags."""
    return _Segment(region, tuple(group), tuple(inputs), tuple(outputs)).plan()


def _runs_whole(node: fx.Node) -> bool:
    """Whether a node calls a block whose hooks must fire once, or whose values are to be dropped by the caller."""
    return bool(node.meta.get("block")) and (not node.meta.get(PASSING) or bool(node.meta.get("hooked")))


def changes_buffers(region: Region, group: Sequence[fx.Node]) -> bool:
    """Whether the graph itself, not a layer it calls, writes to an attribute: the next forward writes there too."""
    attributes = {source for node in group for source in node.all_input_nodes if source.op == "get_attr"}
    held = {storage for node in attributes for storage in storages_of(node)}
    by_name = {node.name: node for node in region.graph.nodes}
    written = {name for node in group for name in node.meta.get("writes", ())}
    if held & {storage for name in written for storage in storages_of(by_name[name])}:
        return True
    return any(str(node.target) in region.written_buffers for node in attributes)


@dataclass
class _Segment:
    region: Region
    group: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    places: dict[fx.Node, Place] = field(default_factory=dict)
    homes: dict[int, fx.Node] = field(default_factory=dict)
    """Storage of a fake value -> the node that made it."""

    def __post_init__(self) -> None:
        for node in (*self.inputs, *self.group):
            self.places[node] = len(self.places)
        attributes = {source for node in self.group for source in node.all_input_nodes if source.op == "get_attr"}
        for node in (*attributes, *self.inputs, *self.group):
            for storage in storages_of(node):
                self.homes.setdefault(storage, node)

    def plan(self) -> Plan:
        written = self._written()
        steps = {self.places[node]: self._step(node) for node in self.group if self._repeats(node, written)}
        without = {self.places[node] for node in self.group} - set(steps)
        kept = {self.places[home] for node in self.group if node.meta.get(KEEP) for home in self._homes(node)}
        kept |= {self.places[node] for node in self.group if node.meta.get(KEEP) and not self.is_view(node)}
        passing = any(node.meta.get(PASSING) for node in self.group)
        kept_state = {self.places[node] for node in self.group if passing or node.meta.get(KEEP_STATE)}
        plan = Plan(
            self.region.path,
            compile_graph(self._forward(None), self.region.path),
            _not_yet,
            steps,
            frozenset(kept & set(steps) | without),
            frozenset(kept_state | without),
            owners_of(step for step in self.group if self.places[step] in steps),
            self._released(),
            passing,
            {self.places[node]: unread for node in self.group if passing and (unread := _unread(node))},
            by_data=any(map(_is_sized_by_data, self.group)),
        )
        object.__setattr__(plan, "recorded", compile_graph(self._forward(plan), self.region.path))
        return plan

    def _released(self) -> frozenset[Place]:
        """Nodes that are not to be held, and all views of what they give."""
        tagged = {node for node in self.group if node.meta.get(RELEASE)}
        if not tagged:
            return frozenset()
        return frozenset(self.places[node] for node in self.group if tagged & {node, *self._homes(node)})

    # Which nodes run again.

    def _written(self) -> set[fx.Node]:
        """Nodes that write in place, and those that read what is written later: none of them runs again."""
        found: set[fx.Node] = set()
        order = {node: place for place, node in enumerate(self.region.graph.nodes)}
        by_name = {node.name: node for node in self.region.graph.nodes}
        for writer in self.group:
            storages = {key for name in writer.meta.get("writes", ()) for key in storages_of(by_name[name])}
            if not storages:
                continue
            found.add(writer)
            for node in self.group:
                reads = {key for source in (*node.all_input_nodes, node) for key in storages_of(source)}
                if reads & storages and order[node] <= order[writer]:
                    found.add(node)
        return found

    def _repeats(self, node: fx.Node, written: set[fx.Node]) -> bool:
        if not value_tensors(node.meta.get("val")):
            return False
        if draws_by_itself(node) or node.meta.get(REREADS):
            return False
        return not node.meta.get("writes") and (node not in written or self.is_view(node))

    def _homes(self, node: fx.Node) -> list[fx.Node]:
        """The nodes of the segment in whose storage the node's value lies."""
        homes = (self.homes.get(storage) for storage in storages_of(node))
        return [home for home in homes if home is not None and home in self.places and home not in self.inputs]

    def is_view(self, node: fx.Node) -> bool:
        """Whether all the node gives lies in storage that another one made."""
        storages = storages_of(node)
        return bool(storages) and all(self.homes[storage] is not node for storage in storages)

    def _step(self, node: fx.Node) -> Step:
        sources = [source for source in node.all_input_nodes if source.op != "get_attr"]
        part, made = fx.Graph(), dict[fx.Node, fx.Node]()
        for source in sources:
            made[source] = part.placeholder(source.name)
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                made[source] = part.node_copy(source)
        part.output(copy_graded(part, node, made))
        return Step(
            compile_graph(part, self.region.path),
            tuple(self.places[source] for source in sources),
            tuple(any(each.requires_grad for each in value_tensors(source.meta.get("val"))) for source in sources),
            random=_is_random(node) and self._read_again(node),
            masked=_masks(node),
            buffers=written_buffers(self.region, [node]),
            owners=_owning_paths([node]),
        )

    def _read_again(self, node: fx.Node) -> bool:
        """Whether a value may be wanted again: of what passes between blocks what the last one gives is not."""
        return not node.meta.get(PASSING) or any(user in self.places for user in node.users)

    # The forward.

    def _forward(self, plan: Plan | None) -> fx.Graph:
        """The segment as a graph; with a plan, one that tells a run of its values."""
        part, made = fx.Graph(), dict[fx.Node, fx.Node]()
        teller = None if plan is None else _Teller(self, plan, part)
        for node in self.inputs:
            made[node] = part.placeholder(node.name)
        last = self._last_uses() if plan is not None else {}
        for node in self.group:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source not in made:  # read inside: a weight is never held as an input
                    made[source] = part.node_copy(source)
                    if teller is not None:
                        teller.read(source, made[source])
            if teller is None:
                made[node] = part.node_copy(node, made.__getitem__)
            else:
                made[node] = teller.run(node, made, [self.places[home] for home in last.get(node, ())])
        part.output(tuple(made[node] for node in self.outputs))
        return part

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """Node -> the nodes of the segment whose values nothing reads after it, views of them included."""
        escaping = {home for node in self.outputs for home in (*self._homes(node), node)}
        last: dict[fx.Node, fx.Node] = {}
        for node in self.group:
            for source in (*node.all_input_nodes, node):
                for home in self._homes(source):
                    last[home] = node
        ends: dict[fx.Node, list[fx.Node]] = {}
        for home, node in last.items():
            if home not in escaping:
                ends.setdefault(node, []).append(home)
        return ends


class _Teller:
    """Writes the calls that tell a run of the values of its segment."""

    def __init__(self, segment: _Segment, plan: Plan, part: fx.Graph) -> None:
        self.segment, self.plan, self.part = segment, plan, part
        self.told = part.placeholder("recompute_run")

    def tell(self, method: str, *args: Any) -> fx.Node:
        return self.part.call_method(method, (self.told, *args))

    def read(self, source: fx.Node, value: fx.Node) -> None:
        if not isinstance(source.meta.get("val"), nn.Parameter):
            self.tell("know", value)

    def run(self, node: fx.Node, made: dict[fx.Node, fx.Node], gone: list[Place]) -> fx.Node:
        place = self.segment.places[node]
        step = self.plan.steps.get(place)
        if step is not None and step.masked and place in self.plan.kept_state:
            method = "dropout" if node.op == "call_function" else "dropout_module"
            copied = self._through_run(method, node, place, made)
        else:
            if step is not None and step.random and not self._is_kept_whole(place):
                self.tell("draws", place)
            copied = self._called(node, place, made)
        if _computes(node) and not (self.segment.is_view(node) and _saves_nothing(node)):
            self.tell("made", place, copied, *gone)
            return copied
        if step is None and place in self.plan.held:
            self.tell("hold", place, copied)
        if gone:
            self.tell("gone", *gone)
        return copied

    def _is_kept_whole(self, place: Place) -> bool:
        return place in self.plan.kept and place in self.plan.kept_state

    def _called(self, node: fx.Node, place: Place, made: dict[fx.Node, fx.Node]) -> fx.Node:
        if node.meta.get("block"):
            return self._through_run("block", node, place, made)
        return self.part.node_copy(node, made.__getitem__)

    def _through_run(self, method: str, node: fx.Node, place: Place, made: dict[fx.Node, fx.Node]) -> fx.Node:
        """The node, run by a method of the run."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
        called = (self.part.get_attr(str(node.target)),) if node.op == "call_module" else ()
        told = self.part.create_node("call_method", method, (self.told, place, *called, *args), kwargs, name=node.name)
        told.meta = dict(node.meta)
        return told


def _not_yet(*_: Any) -> Any:
    raise AssertionError("replaced when the plan is complete")


def owners_of(nodes: Iterable[fx.Node]) -> Owners:
    """Gives the modules below a region's own whose parameters `nodes` read."""
    return owners_at(_owning_paths(nodes))


def _owning_paths(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    paths: dict[str, None] = {}
    for node in nodes:
        if node.op == "call_module":
            paths[str(node.target)] = None
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                paths[str(source.target).rpartition(".")[0]] = None
    return tuple(paths)


def written_buffers(region: Region, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """Of the buffers that the region writes, those that `nodes` touch."""
    touched = [f"{node.target}." for node in nodes if node.op == "call_module"]
    sources = {source for node in nodes for source in node.all_input_nodes if source.op == "get_attr"}
    read = {str(source.target) for source in sources}
    return tuple(path for path in region.written_buffers if path in read or path.startswith(tuple(touched)))


def storages_of(node: fx.Node) -> list[int]:
    """Identities of the storages that a node's fake value lies in, dense ones."""
    dense = [tensor for tensor in value_tensors(node.meta.get("val")) if tensor.layout == torch.strided]
    return [tensor.untyped_storage()._cdata for tensor in dense]


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_sized_by_data(node: fx.Node) -> bool:
    """Whether a size of what it gives is known when it has run, and not before."""
    sizes = (size for tensor in value_tensors(node.meta.get("val")) for size in tensor.shape)
    return any(isinstance(size, torch.SymInt) and not size.node.has_hint() for size in sizes)


def _unread(node: fx.Node) -> frozenset[int]:
    """Of a node that gives several values, the positions of those that nothing reads."""
    value = node.meta.get("val")
    if not isinstance(value, (tuple, list)) or any(user.target is not operator.getitem for user in node.users):
        return frozenset()
    read = {user.args[1] for user in node.users if user.users}
    return frozenset(part for part in range(len(value)) if part not in read)


def _saves_nothing(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and isinstance(node.args[0].meta.get("val"), (tuple, list))
    return _name(node) in VIEWS


def draws_by_itself(node: fx.Node) -> bool:
    """Whether the node draws from a generator of the user's own, whose state is not brought back."""
    return node.kwargs.get("generator") is not None


def _is_random(node: fx.Node) -> bool:
    return bool(node.meta.get("random", node.op == "call_module"))


def _masks(node: fx.Node) -> bool:
    if node.op == "call_module":
        return node.meta.get("module_type") is nn.Dropout and len(node.args) == 1 and not node.kwargs
    inplace = node.kwargs.get("inplace", node.args[3] if len(node.args) > 3 else False)
    return node.target is nn.functional.dropout and not inplace and bool(node.args) and set(node.kwargs) <= {
        "p", "training", "inplace"}  # fmt: skip


def _computes(node: fx.Node) -> bool:
    """Whether a node may run an operator, rather than reckon with sizes."""
    return bool(value_tensors(node.meta.get("val"))) or node.op == "call_module" or bool(node.meta.get("writes"))
