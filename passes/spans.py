"""Which runs of a graph's nodes can be recomputed in one piece, and the tags that say so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from passes.kept_frozen import kept_frozen
from passes.nodes import ROUTING, called_path, function_name, is_effect, mode_change, tensors_of
from rewrite import DETACH, KEEP, RECOMPUTE, Change, Refusal

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite import Program, Region

SPLIT_SPAN = "a no_grad or autocast span begins inside it and ends outside; select a module around the whole span"
IN_SPAN = (
    "runs in a no_grad or autocast span of it and must run once, for its hooks or its own Python; remove the hooks, or "
    "leave this module out"
)


class Tags:
    """Tags nodes of one program, and gathers what was done and what was not."""

    def __init__(self, program: Program) -> None:
        self.once = {path for entry in program.opaque for path in _lineage(entry.path)}
        """Modules without a graph, and those that hold one: their own Python must run once."""
        self.changing = {
            path: _changed(region, node)
            for region in program.regions
            for node in region.nodes()
            if _parameters_written(region, node)
            for instance in region.instances
            for path in _lineage(instance)
        }
        """Modules that run a graph which changes parameters in place, and how."""
        self.changes: list[Change] = []
        self.refusals: list[Refusal] = []

    def tag(self, region: Region, parts: Mapping[str, str], summary: str) -> bool:
        """Tag the nodes named in `parts` as segments: one for each run of nodes of the same part.

        What must not run twice stays outside and ends a segment: modules with hooks, modules without a graph, and
        functions that bring Python objects up to date. Frozen nodes that are to run once stay outside too, and run
        before the segment. Returns whether anything was tagged.
        """
        plan = self._plan(region, parts)
        if isinstance(plan, str):
            self.refusals.append(Refusal(region.path, plan))
            return False
        for node, segment in plan.items():
            node.meta[RECOMPUTE] = segment
            if function_name(node) in ROUTING:
                node.meta[KEEP] = True
        if plan:
            self.changes.append(Change(region.path, summary, region.instances, tuple(node.name for node in plan)))
        return bool(plan)

    def _plan(self, region: Region, parts: Mapping[str, str]) -> dict[Node, int] | str:
        """Node -> segment, or the reason there can be none."""
        for node in region.nodes():
            changed = self._changed(region, node) if node.name in parts else ""
            if changed:
                return changed
        taken = [node.meta[RECOMPUTE] for node in region.nodes() if RECOMPUTE in node.meta]
        segment = max(taken, default=-1) + 1
        plan: dict[Node, int] = {}
        part: str | None = None
        depth = 0
        frozen = _frozen(region)
        for node in region.nodes():
            if node in frozen:
                continue
            inside = node.name in parts and self._may_run_twice(region, node)
            ends = part is not None and (parts.get(node.name) != part if inside else _matters(node))
            if ends and depth:
                return SPLIT_SPAN if inside or node.name not in parts else f"{_called(node)} {IN_SPAN}"
            if ends:
                segment, part = segment + 1, None
            if inside:
                depth += mode_change(node)
                plan[node] = segment
                part = parts[node.name]
        if depth:
            return SPLIT_SPAN
        return plan if any(_computes(node) for node in plan) else {}

    def _changed(self, region: Region, node: Node) -> str:
        """Which parameter a node, or the graph it calls, changes in place; "" for none."""
        if _parameters_written(region, node):
            return _changed(region, node)
        return self.changing.get(called_path(region, node), "") if node.op == "call_module" else ""

    def _may_run_twice(self, region: Region, node: Node) -> bool:
        if node.op in ("placeholder", "output", "get_attr") or RECOMPUTE in node.meta or node.meta.get("hooked"):
            return False
        return not is_effect(node) and not (node.op == "call_module" and called_path(region, node) in self.once)


def _parameters_written(region: Region, node: Node) -> list[str]:
    """The parameters that a node changes in place, by path below the region's module."""
    named = {each.name: each for each in region.nodes() if each.op == "get_attr"} if node.meta.get("writes") else {}
    found = [str(named[name].target) for name in node.meta.get("writes", ()) if name in named]
    return [path for path in found if path not in region.written_buffers]


def _changed(region: Region, node: Node) -> str:
    place = f" ({node.meta['source']})" if node.meta.get("source") else ""
    return (
        f"its forward changes the parameter {_parameters_written(region, node)[0]!r} in place{place}, and a recompute "
        "would change it again; change it in the training loop instead"
    )


def _frozen(region: Region) -> frozenset[Node]:
    """Detached nodes that no recompute is to run again."""
    if not any(DETACH in node.meta for node in region.nodes()):
        return frozenset()
    return kept_frozen(region)


def _lineage(path: str) -> Iterator[str]:
    """A module path and those of the modules around it."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _matters(node: Node) -> bool:
    """Whether a node outside stands between two of a segment: it computes something, or changes an object."""
    return node.op.startswith("call") and (_computes(node) or is_effect(node) or mode_change(node) != 0)


def _called(node: Node) -> str:
    return f"the module {node.target!r}" if node.op == "call_module" else f"the function {function_name(node)}"


def _computes(node: Node) -> bool:
    return node.op == "call_module" or any(True for _ in tensors_of(node.meta.get("val")))
