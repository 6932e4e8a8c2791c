"""What a session records of one region, and how it can end early."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from rewrite.capture.randomness import draws_in_module
from rewrite.capture.structure import has_hooks
from rewrite.capture.symbols import Predicate


class TimeUpError(BaseException):
    """The capture took longer than it may."""


class StoppedError(BaseException):
    """A module without a graph could not be run on fakes either; what comes after it was not reached."""


@dataclass
class Captured:
    """One region's graph, and the calls it may serve."""

    path: str
    instances: list[str]
    module: nn.Module
    graph: fx.Graph
    skeleton: Hashable
    result: Any
    """Skeleton of what the region returns."""
    leaves: list[Any]
    likeness: Hashable
    """What a call of a sibling must share to be served by this graph without a run."""
    key: Hashable
    """What a later call must share; with `predicate` and `questions` it decides whether the graph serves."""
    conditions: tuple[int, int] = (0, 0)
    questions: list[tuple[fx.Graph, bool]] = field(default_factory=list)
    written_buffers: tuple[str, ...] = ()
    mutated_inputs: tuple[str, ...] = ()
    shared: bool = True
    """Whether the graph read nothing that differs between the elements of its stack."""
    out: Any = None
    predicate: Predicate = bool
    predicate_text: str = ""

    @property
    def random(self) -> bool:
        """Whether a call of it may draw random numbers."""
        return any(node.meta.get("random", node.op == "call_module") for node in self.graph.nodes)

    @property
    def fills_late(self) -> bool:
        return any(map(fills_late, self.graph.nodes))


def layer_facts(module: nn.Module) -> dict[str, Any]:
    """What a node that calls the layer tells of it."""
    return {
        "hooked": has_hooks(module),
        "fills_late": any(isinstance(each, nn.RReLU) for each in module.modules()),
        "random": draws_in_module(module),
        "module_type": type(module),
    }


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Buffers that a layer writes without reading them: in training a norm's result is of the batch alone."""
REREADS = "rereads"
"""Key in the `meta` of a node whose layer reads a buffer that it writes: run again, it would read what it wrote."""


def mark_rereading(graph: fx.Graph, written: Iterable[str]) -> None:
    """Mark the layers in `graph` that own one of the buffers at the paths `written`, unless it is a statistic."""
    own = [path for path in written if path.rpartition(".")[2] not in STATISTICS]
    for node in graph.nodes:
        if node.op == "call_module" and any(path.startswith(f"{node.target}.") for path in own):
            node.meta[REREADS] = True


def is_graded(node: fx.Node) -> bool:
    """Whether a node computes other last bits with grad mode off: oneDNN's LSTMs for training and for inference do."""
    kind = node.meta.get("module_type")
    if isinstance(kind, type):
        return issubclass(kind, nn.LSTM)
    return getattr(node.target, "__name__", node.target) == "lstm"


def fills_late(node: fx.Node) -> bool:
    """Whether what a node calls may fill a tensor after saving it for the backward, as rrelu does with its noise."""
    return bool(node.meta.get("fills_late")) or "rrelu" in str(getattr(node.target, "__name__", node.target))
