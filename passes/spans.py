"""Which runs of a graph's nodes can be recomputed in one piece, and the tags that say so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rewrite import DETACH, KEEP, RECOMPUTE, Change, Refusal

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite import Program, Region

ROUTING = frozenset({"topk", "sort", "argsort", "kthvalue", "msort", "unique"})
"""Functions whose result may differ between two runs when values tie: their value is kept."""
SPLIT_SPAN = "a no_grad or autocast span begins inside it and ends outside; select a module around the whole span"
IN_SPAN = (
    "runs in a no_grad or autocast span of it and must run once, for its hooks or its own Python; remove the hooks, or "
    "leave this module out"
)
EFFECTS = ("assign_", "new_object", "build_", "expect")
"""Prefixes of the functions that bring Python objects up to date: never part of a recompute."""


class Tags:
    """Tags nodes of one program, and gathers what was done and what was not."""

    def __init__(self, program: Program) -> None:
        self.once = {path for entry in program.opaque for path in _lineage(entry.path)}
        """Modules without a graph, and those that hold one: their own Python must run once."""
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

    def _may_run_twice(self, region: Region, node: Node) -> bool:
        if node.op in ("placeholder", "output", "get_attr") or RECOMPUTE in node.meta or node.meta.get("hooked"):
            return False
        return not is_effect(node) and not (node.op == "call_module" and called_path(region, node) in self.once)


def _frozen(region: Region) -> frozenset[Node]:
    """Detached nodes that no recompute is to run again."""
    if not any(DETACH in node.meta for node in region.nodes()):
        return frozenset()
    from passes.kept_frozen import kept_frozen  # which asks this module in turn

    return kept_frozen(region)


def _lineage(path: str) -> Iterator[str]:
    """A module path and those of the modules around it."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _matters(node: Node) -> bool:
    """Whether a node outside stands between two of a segment: it computes something, or changes an object."""
    return node.op.startswith("call") and (_computes(node) or is_effect(node) or mode_change(node) != 0)


def called_path(region: Region, node: Node) -> str:
    """Absolute path of the module that a `call_module` node calls, for the region's first instance."""
    return f"{region.path}.{node.target}".lstrip(".")


def path_in(node: Node, region: Region, instance: str) -> str:
    """Module path of a node as the given instance of its region sees it."""
    path: str = node.meta.get("module_path", region.path)
    if node.op == "call_module":
        path = f"{region.path}.{node.target}".lstrip(".")
    return instance + path[len(region.path) :] if region.path else path


def _called(node: Node) -> str:
    return f"the module {node.target!r}" if node.op == "call_module" else f"the function {function_name(node)}"


def mode_change(node: Node) -> int:
    """How far a node opens (1) or closes (-1) a span of no_grad or autocast."""
    name = function_name(node)
    if name == "set_grad_enabled":
        return -1 if node.args[0] else 1
    return {"enter_autocast": 1, "exit_autocast": -1}.get(name, 0)


def function_name(node: Node) -> str:
    """Bare name of the function or method a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def is_effect(node: Node) -> bool:
    """Whether a node brings a Python object up to date rather than computing a tensor."""
    return node.op == "call_function" and function_name(node).startswith(EFFECTS)


def _computes(node: Node) -> bool:
    return node.op == "call_module" or any(True for _ in tensors_of(node.meta.get("val")))


def storages(nodes: Iterable[Node]) -> set[int]:
    """Identities of the storages behind the fake values of `nodes`."""
    values = (tensor for node in nodes for tensor in tensors_of(node.meta.get("val")))
    return {tensor.untyped_storage()._cdata for tensor in values if str(tensor.layout) == "torch.strided"}


def tensors_of(value: Any) -> Iterator[Any]:
    """The tensors in a node's value."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)


def made_bytes(node: Node) -> int:
    """Bytes of the tensors a node gives, for the example inputs."""
    made = tensors_of(node.meta.get("val"))
    return sum(math.prod(map(hint, tensor.shape)) * tensor.element_size() for tensor in made)


def hint(size: Any) -> int:
    """A size for the example inputs."""
    hint = getattr(getattr(size, "node", None), "hint", size)
    return int(hint) if hint is not None else 1


def takes_object(node: Node) -> bool:
    """Whether a call is given a Python object that it may change, such as a key-value cache."""
    makers = ("assign_", "new_object")
    return any(
        source.meta.get("object") or (source.op == "call_function" and function_name(source).startswith(makers))
        for source in node.all_input_nodes
    )
