"""What each node of a graph makes, saves for the backward and costs, found by running the graph once on fakes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from rewrite.memory.rates import Rates
from rewrite.plan.interpret import run_node
from rewrite.plan.price import Effort, Efforts, mask_seconds, masked_seconds
from rewrite.plan.rerun import draws_mask, may_rerun
from rewrite.plan.stage import Stage
from rewrite.program import value_tensors
from rewrite.recompute.states import limit_bytes

RANDOM_STATE_BYTES = 5056
"""The state of a CPU generator, held for a random node that is to be run again."""


@dataclass(frozen=True)
class NodeProfile:
    """One node that makes a value of its own: views, sizes and numbers belong to the node they are made from."""

    name: str
    bytes: int
    """Of the storages it makes; 0 for a value that passes on to a later piece, which stays alive anyway."""
    state_bytes: int = 0
    """What its operator saves beside its inputs and result, where that is held only if it is to be kept."""
    mask_bytes: int | None = None
    """For a dropout whose state is a mask: what the mask takes once it is kept as one byte an element."""
    needed: bool = False
    """Whether the backward reads its value."""
    fixed: bool = False
    """Whether it may not be run again."""
    sources: tuple[str, ...] = ()
    """The nodes whose values it is made from."""
    seconds: float = 0.0
    """Of running it again."""
    masked_seconds: float = 0.0
    """Of running a dropout again from its kept mask."""
    mask_seconds: float = 0.0
    """Of making a mask small in the forward and large again in the backward."""
    replay_bytes: int = 0
    """What is held so that it can be run again: a generator's state."""

    @property
    def kept_state_bytes(self) -> int:
        """Bytes that keeping its state takes."""
        return self.state_bytes if self.mask_bytes is None else self.mask_bytes


@dataclass(frozen=True)
class Profile:
    """A graph's nodes in order, with what is held whatever is kept."""

    nodes: tuple[NodeProfile, ...]
    efforts: Mapping[str, Effort] = field(default_factory=dict)

    def priced(self, seconds: Mapping[str, float]) -> Profile:
        """The same with other times, such as measured ones; a node that is not named keeps its own."""
        nodes = tuple(replace(node, seconds=seconds.get(node.name, node.seconds)) for node in self.nodes)
        return Profile(nodes, self.efforts)


def profile_graph(
    graph: fx.Graph, module: nn.Module, inputs: Sequence[Any], stage: Stage, rates: Rates, passes_on: Sequence[bool]
) -> tuple[Profile, tuple[Any, ...]]:
    """Run `graph`, whose placeholders take `inputs`, on fakes; its profile and what it returns.

    `passes_on` says for each value it returns whether a later piece reads it, so that it stays alive anyway. Raises
    whatever a node raises that cannot run on fakes.
    """
    run = _Run(graph, module, stage, rates)
    returned = run.through(inputs)
    passing = [value for value, passes in zip(returned, passes_on, strict=True) if passes]
    return run.profile(passing), returned


class _Run:
    def __init__(self, graph: fx.Graph, module: nn.Module, stage: Stage, rates: Rates) -> None:
        self.graph = graph
        self.module = module
        self.stage = stage
        self.rates = rates
        self.efforts: dict[fx.Node, Effort] = {}
        self.values: dict[fx.Node, Any] = {}
        self.owners: dict[int, fx.Node | None] = {}
        """Storage -> the node that made it; None for parameters and buffers."""
        self.bytes: dict[fx.Node, int] = {}
        self.saved: list[tuple[fx.Node, torch.Tensor]] = []
        """What autograd saved, with the node that ran. Holding the tensors, so that each storage stays its own."""
        self.current: fx.Node | None = None

    def through(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        given = iter(inputs)
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            self._own(tensor, None)
        tally = Efforts()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _never)
        with torch.enable_grad(), hooks, self.stage.tracker(tally):
            for node in self.graph.nodes:
                self.current = node
                if node.op == "output":
                    returned: tuple[Any, ...] = tuple(fx.map_arg(node.args[0], self.values.__getitem__))
                    return returned
                value = next(given) if node.op == "placeholder" else run_node(node, self.values, self.module)
                self.values[node] = value
                self.efforts[node] = tally.take()
                for tensor in value_tensors(value):
                    self._own(tensor, None if node.op == "get_attr" else node)
        return ()

    def _pack(self, tensor: torch.Tensor) -> None:
        assert self.current is not None
        self.saved.append((self.current, tensor))

    def _own(self, tensor: torch.Tensor, node: fx.Node | None) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.owners:
            return
        self.owners[storage._cdata] = node
        if node is not None:
            self.bytes[node] = self.bytes.get(node, 0) + storage.nbytes()

    def profile(self, passing: Sequence[Any]) -> Profile:
        states = self._states()
        needed = {self._owner(tensor) for _, tensor in self.saved}
        leaving = {self._owner(tensor) for tensor in value_tensors(list(passing))}
        fixed = self._fixed()
        made = [node for node in self.graph.nodes if node in self.bytes and node.op.startswith("call")]
        nodes = tuple(
            self._node(node, states, needed=node in needed, leaves=node in leaving, fixed=node in fixed)
            for node in made
        )
        return Profile(nodes, {node.name: self.efforts[node] for node in made})

    def _node(
        self, node: fx.Node, states: Mapping[fx.Node, list[int]], *, needed: bool, leaves: bool, fixed: bool
    ) -> NodeProfile:
        size, effort = self.bytes[node], self.efforts[node]
        sizes = states.get(node, [])
        large = sum(part for part in sizes if part > limit_bytes(sizes, size))
        mask = effort.drawn if large and draws_mask(node, self.module) else None
        first = value_tensors(self.values[node])[0]
        return NodeProfile(
            node.name,
            0 if leaves else size,
            large,
            mask,
            needed,
            fixed or not may_rerun(node),
            tuple(dict.fromkeys(source.name for source in self._sources(node))),
            effort.seconds(self.rates),
            masked_seconds(first, self.rates) if mask is not None else 0.0,
            mask_seconds(first, self.rates) if mask is not None else 0.0,
            RANDOM_STATE_BYTES if effort.drawn else 0,
        )

    def _fixed(self) -> set[fx.Node]:
        """Nodes that may not be run again, for a node changes what they read or made in place, or they do."""
        named = {node.name: node for node in self.graph.nodes}
        before: list[fx.Node] = []
        fixed: set[fx.Node] = set()
        for node in self.graph.nodes:
            before.append(node)
            written = {owner for name in node.meta.get("writes", ()) for owner in self._owners_of(named[name])}
            if not written:
                continue
            touched = [each for each in before if written & {*self._owners_of(each), *self._sources(each)}]
            fixed.update(each for each in touched if each in self.bytes)
        return fixed

    def _states(self) -> dict[fx.Node, list[int]]:
        """For each node the sizes of the storages its operator made for itself."""
        found: dict[fx.Node, dict[int, int]] = {}
        for node, tensor in self.saved:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.owners:
                found.setdefault(node, {})[storage._cdata] = storage.nbytes()
        return {node: list(sizes.values()) for node, sizes in found.items()}

    def _owner(self, tensor: torch.Tensor) -> fx.Node | None:
        return self.owners.get(tensor.untyped_storage()._cdata)

    def _owners_of(self, node: fx.Node) -> set[fx.Node]:
        if node.op == "output":
            return set()
        found = {self._owner(tensor) for tensor in value_tensors(self.values[node])}
        return {owner for owner in found if owner is not None}

    def _sources(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes of the graph that made the storages `node` reads, placeholders left out."""
        for source in node.all_input_nodes:
            for owner in sorted(self._owners_of(source), key=lambda each: each.name):
                if owner.op.startswith("call"):
                    yield owner


def _never(_: Any) -> Any:
    raise AssertionError("a profile runs no backward")
