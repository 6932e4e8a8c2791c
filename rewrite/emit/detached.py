"""Parts of a graph that run without autograd, because nothing they depend on is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from rewrite.emit.code import compile_graph
from rewrite.program import Region, value_tensors
from rewrite.tags import CUT, DETACH, RECOMPUTE


@dataclass(frozen=True)
class Detached:
    """A run of nodes as a function `(module, *inputs)`, for which autograd keeps no books."""

    function: Callable[..., tuple[Any, ...]]
    cut: bool
    """Whether gradients that the inputs need are to end here."""

    def __call__(self, module: nn.Module, *inputs: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return self.function(module, *inputs)
        if not self.cut and any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs):
            return self.function(module, *inputs)  # thawed before us, or made to need one by a hook
        with torch.no_grad():
            results = self.function(module, *inputs)
        return tuple(map(_writable, results))


def _writable(value: Any) -> Any:
    """A view made without autograd may not be written in place under it; one of the same memory made now may."""
    return value.detach() if isinstance(value, torch.Tensor) and value._is_view() else value


def detached_runs(region: Region) -> Iterator[tuple[fx.Node, ...]]:
    """The runs of nodes of `region` that are called as one without autograd, each in graph order.

    Calls of modules with code of their own, which sees to itself, and of modules with hooks stand outside and end a
    run, as does whatever is trained: no two nodes change their order.
    """
    run: list[fx.Node] = []
    kind: Any = None
    for node in region.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        found = node.meta.get(DETACH) if _can_run_inside(node) else None
        if found != kind:
            yield from _worthwhile(run)
            run, kind = [], found
        if found:
            run.append(node)
    yield from _worthwhile(run)


def _can_run_inside(node: fx.Node) -> bool:
    return node.op.startswith("call") and not (
        RECOMPUTE in node.meta or node.meta.get("block") or node.meta.get("hooked")
    )


def _worthwhile(run: list[fx.Node]) -> Iterator[tuple[fx.Node, ...]]:
    if any(value_tensors(node.meta.get("val")) for node in run):
        yield tuple(run)


def detached(
    region: Region, group: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> Detached:
    """The code of one run."""
    part, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        made[node] = part.placeholder(node.name)
    for node in group:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in made:  # read inside: FSDP2 replaces weights
                made[source] = part.node_copy(source)
        made[node] = part.node_copy(node, made.__getitem__)
    part.output(tuple(made[node] for node in outputs))
    return Detached(compile_graph(part, region.path), group[0].meta[DETACH] == CUT)
