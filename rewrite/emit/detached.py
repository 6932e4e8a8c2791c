"""Parts of a graph that run without autograd, because nothing they depend on is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx, nn

from rewrite import runtime
from rewrite.emit.code import compile_graph, copy_graded
from rewrite.program import Region, value_tensors
from rewrite.tags import CUT, DETACH, RECOMPUTE, WITHIN


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


class Around(Protocol):
    """What a pass tags nodes `WITHIN`: it makes the function that runs them as one."""

    def around(
        self,
        compiled: Callable[[Sequence[str]], Callable[..., tuple[Any, ...]]],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
    ) -> Callable[..., tuple[Any, ...]]:
        """`(module, *inputs)` to the outputs; `compiled(names)` is code for some of the outputs, by node name."""


def _writable(value: Any) -> Any:
    """A view made without autograd may not be written in place under it; one of the same memory made now may."""
    return value.detach() if isinstance(value, torch.Tensor) and value._is_view() else value


def detached_runs(region: Region) -> Iterator[tuple[fx.Node, ...]]:
    """The runs of nodes of `region` that are called as one without autograd, each in graph order.

    Calls of modules with code of their own, which sees to itself, and of modules with hooks stand outside and end a
    run, as does whatever is trained: no two nodes change their order.
    """
    within: dict[int, list[fx.Node]] = {}
    for node in region.graph.nodes:
        if WITHIN in node.meta and RECOMPUTE not in node.meta:
            within.setdefault(id(node.meta[WITHIN]), []).append(node)
    yield from map(tuple, within.values())
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
    apart = RECOMPUTE in node.meta or WITHIN in node.meta or node.meta.get("block") or node.meta.get("hooked")
    return node.op.startswith("call") and not apart


def _worthwhile(run: list[fx.Node]) -> Iterator[tuple[fx.Node, ...]]:
    if any(value_tensors(node.meta.get("val")) for node in run):
        yield tuple(run)


def detached(
    region: Region, group: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> Callable[..., tuple[Any, ...]]:
    """The code of one run, `(module, *inputs)` to its outputs."""
    if WITHIN not in group[0].meta:
        return Detached(_compiled(region, group, inputs, outputs), group[0].meta[DETACH] == CUT)
    by_name = {node.name: node for node in outputs}

    def compiled(names: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
        wanted = [by_name[name] for name in names]
        return _compiled(region, _needed(group, wanted), inputs, wanted)

    around: Around = group[0].meta[WITHIN]
    return around.around(compiled, tuple(node.name for node in inputs), tuple(by_name))


def _compiled(
    region: Region, group: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> Callable[..., tuple[Any, ...]]:
    """The nodes of `group` as code."""
    part, made, off = fx.Graph(), dict[fx.Node, fx.Node](), _without_grad(region)
    for node in inputs:
        made[node] = part.placeholder(node.name)
    for node in group:
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in made:  # read inside: FSDP2 replaces weights
                made[source] = part.node_copy(source)
        made[node] = part.node_copy(node, made.__getitem__) if node in off else copy_graded(part, node, made)
    part.output(tuple(made[node] for node in outputs))
    return compile_graph(part, region.path)


def _without_grad(region: Region) -> set[fx.Node]:
    """The nodes that the original runs with grad mode off."""
    found, on = set[fx.Node](), True
    for node in region.graph.nodes:
        if node.target is runtime.set_grad_enabled:
            on = bool(node.args[0])
        elif not on:
            found.add(node)
    return found


def _needed(group: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Of `group`, what `outputs` depend on, and the spans of no_grad and autocast around it."""
    wanted = set(outputs)
    for node in reversed(group):
        if node in wanted or not (node.users or value_tensors(node.meta.get("val"))):
            wanted.update((node, *node.all_input_nodes))
    return [node for node in group if node in wanted]
