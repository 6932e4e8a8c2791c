"""Drop activations after the forward and compute them again in the backward.

`policy=blocks` recomputes each repeated block from its inputs; `policy=sqrt` recomputes segments of about
square-root of the depth blocks (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rewrite import KEEP, RECOMPUTE, Change, Numerics, Pass, PassError, PassResult, Refusal, SelectorError, matches

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite import Program, Region

POLICIES = ("blocks", "sqrt")
ROUTING = frozenset({"topk", "sort", "argsort", "kthvalue", "msort", "unique"})
"""Functions whose result may differ between two runs when values tie: their value is kept."""
EFFECTS = ("assign_", "new_object", "build_", "expect")
"""Prefixes of the functions that bring Python objects up to date: never part of a recompute."""
ALONE = (
    "no graph calls several of these blocks in a row without passing them a cache; each is recomputed by itself: turn "
    "the cache off (use_cache=False) to have segments of several"
)
"""Why policy `sqrt` takes blocks one by one."""


@dataclass(frozen=True)
class Checkpoint(Pass):
    """Recompute parts of the model in the backward instead of keeping their activations."""

    policy: str = "blocks"
    """`blocks`: each repeated block by itself. `sqrt`: segments of about square-root of the depth blocks."""
    every: int = 1
    """With `blocks`: recompute every n-th block of each stack, starting with the first."""
    select: tuple[str, ...] | str | None = None
    """Module path globs (`encoder.layer.[0-5]`, `**.mlp`): recompute these modules, whatever the policy's blocks."""

    name: ClassVar[str] = "checkpoint"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            subject = f"checkpoint{{policy={self.policy}}}"
            raise PassError(subject, "there is no such policy", f"choose one of {', '.join(POLICIES)}")
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            subject = f"checkpoint{{every={self.every}}}"
            raise PassError(subject, "every is a whole number from 1", "leave it out to recompute every block")
        if self.every > 1 and (self.policy != "blocks" or self.select is not None):
            cause = "`every` counts blocks: it goes with policy=blocks and without `select`"
            raise PassError("checkpoint", cause, "leave one of them out")

    def apply(self, program: Program) -> PassResult:
        """Tag the nodes to recompute; nodes that are tagged already stay as they are."""
        if self.select is not None:
            return self._selected(program, (self.select,) if isinstance(self.select, str) else self.select)
        if self.policy == "sqrt":
            return _Segments(program).apply()
        return self._blocks(program)

    def _blocks(self, program: Program) -> PassResult:
        blocks = program.metadata.get("blocks", ())
        if not any(path in blocks for region in program.regions for path in region.instances):
            reason = (
                "the model has no stack of repeated blocks with a graph; use policy=sqrt, or name modules with select="
            )
            return PassResult(program, False, refusals=(Refusal("", reason),) if _is_whole(program) else ())
        wanted = {path for stack in _stacks(blocks).values() for path in stack[:: self.every]}
        return _tag_instances(program, wanted)

    def _selected(self, program: Program, patterns: Sequence[str]) -> PassResult:
        changes: list[Change] = []
        refusals: list[Refusal] = []
        found: set[str] = set()
        summary = f"recompute what {', '.join(patterns)} selects"
        for region in program.regions:
            for names, instances in _chosen(patterns, region).items():
                program, part = program.split(program.region(instances[0]), tuple(instances))
                paths = [_path_in(node, part, part.path) for node in part.nodes() if node.name in names]
                found |= {pattern for pattern in patterns for path in paths if matches(pattern, path)}
                _tag(part, set(names), changes, refusals, summary)
        missing = [pattern for pattern in patterns if pattern not in found]
        if missing and _is_whole(program):
            raise SelectorError(
                f"checkpoint{{select={missing[0]}}}",
                "it matches no module that a graph of the model runs",
                "give a path as named_modules() shows it, with * for one component and ** for any number",
            )
        return PassResult(program, bool(changes), tuple(changes), tuple(refusals))


def _is_whole(program: Program) -> bool:
    """Whether the program is a whole model's, rather than one block's that met a new kind of call."""
    return not program.regions or not program.regions[0].path


def _chosen(patterns: Sequence[str], region: Region) -> dict[tuple[str, ...], list[str]]:
    """Names of the nodes that the patterns select, with the instances for which they do."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for instance in region.instances:
        selected = [node for node in region.nodes() if _selects(patterns, _path_in(node, region, instance))]
        groups.setdefault(tuple(node.name for node in selected), []).append(instance)
    return {names: instances for names, instances in groups.items() if names}


def _stacks(blocks: Iterable[str]) -> dict[str, list[str]]:
    """Block paths by the stack that holds them, in order."""
    stacks: dict[str, list[str]] = {}
    for path in blocks:
        stacks.setdefault(path.rpartition(".")[0], []).append(path)
    return stacks


def _path_in(node: Node, region: Region, instance: str) -> str:
    """Module path of a node as the given instance of its region sees it."""
    path: str = node.meta.get("module_path", region.path)
    if node.op == "call_module":
        path = f"{region.path}.{node.target}".lstrip(".")
    return instance + path[len(region.path) :] if region.path else path


def _selects(patterns: Sequence[str], path: str) -> bool:
    return any(matches(pattern, path) for pattern in patterns)


def _tag_instances(program: Program, wanted: set[str]) -> PassResult:
    """Recompute each wanted block from its inputs."""
    changes: list[Change] = []
    refusals: list[Refusal] = []
    reused = _inputs_written_later(program)
    summary = "recompute in the backward, from the block's inputs"
    for region in list(program.regions):
        taken = tuple(path for path in region.instances if path in wanted and path not in reused)
        refusals += [Refusal(path, reused[path]) for path in region.instances if path in wanted and path in reused]
        if taken:
            program, part = program.split(region, taken)
            _tag(part, {node.name for node in part.nodes()}, changes, refusals, summary)
    return PassResult(program, bool(changes), tuple(changes), tuple(refusals))


def _inputs_written_later(program: Program) -> dict[str, str]:
    """Blocks whose input the graph around them changes in place after the call: it could not be recomputed from."""
    found: dict[str, str] = {}
    for region in program.regions:
        calls: list[tuple[str, set[int]]] = []
        for node in region.nodes():
            written = _storages(other for other in region.nodes() if other.name in node.meta.get("writes", ()))
            for path, inputs in calls:
                if written & inputs:
                    found[path] = _written_later(node)
            if node.op == "call_module":
                calls.append((f"{region.path}.{node.target}".lstrip("."), _storages(node.all_input_nodes)))
    return found


def _written_later(node: Node) -> str:
    place = f" at {node.meta['source']}" if node.meta.get("source") else ""
    cause = f"its input is changed in place{place}, after the block has run"
    return f"{cause}; write that line without the in-place operation to have the block recomputed"


def _storages(nodes: Iterable[Node]) -> set[int]:
    """Identities of the storages behind the fake values of `nodes`."""
    return {tensor.untyped_storage()._cdata for node in nodes for tensor in _tensors(node.meta.get("val"))}


def _tensors(value: Any) -> Iterator[Any]:
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _tag(region: Region, names: set[str], changes: list[Change], refusals: list[Refusal], summary: str) -> None:
    """Tag the named nodes as segments; a module somebody hooked ends a segment, so that its hooks fire once."""
    plan = _plan(region, names)
    if isinstance(plan, str):
        refusals.append(Refusal(region.path, plan))
        return
    if not plan:
        return
    for node, segment in plan.items():
        node.meta[RECOMPUTE] = segment
        if _function_name(node) in ROUTING:
            node.meta[KEEP] = True
    changes.append(Change(region.path, summary, region.instances, tuple(node.name for node in plan)))


def _plan(region: Region, names: set[str]) -> dict[Node, int] | str:
    """Node -> segment, or the reason there can be none."""
    taken = [node.meta[RECOMPUTE] for node in region.nodes() if RECOMPUTE in node.meta]
    segment = max(taken, default=-1) + 1
    plan: dict[Node, int] = {}
    depth = 0
    for node in region.nodes():
        if node.op in ("placeholder", "output", "get_attr") or RECOMPUTE in node.meta:
            continue
        if node.name in names and not node.meta.get("hooked") and not _is_effect(node):
            depth += _mode_change(node)
            plan[node] = segment
        elif node.meta.get("hooked") and node.name in names:
            if depth:
                return f"the hooked module {_called(node)} runs in a no_grad or autocast span of it; remove the hooks"
            segment += 1
    if depth:
        return "a no_grad or autocast span begins inside it and ends outside; select a module around the whole span"
    return plan if any(_computes(node) for node in plan) else {}


def _called(node: Node) -> str:
    return repr(node.target) if node.op == "call_module" else _function_name(node)


def _mode_change(node: Node) -> int:
    """How far a node opens (1) or closes (-1) a span of no_grad or autocast."""
    name = _function_name(node)
    if name == "set_grad_enabled":
        return -1 if node.args[0] else 1
    return {"_enter_autocast": 1, "_exit_autocast": -1}.get(name, 0)


def _function_name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _is_effect(node: Node) -> bool:
    return node.op == "call_function" and _function_name(node).startswith(EFFECTS)


def _computes(node: Node) -> bool:
    return node.op == "call_module" or any(True for _ in _tensors(node.meta.get("val")))


class _Segments:
    """Policy sqrt: cut the graph that calls the blocks into segments of about equal bytes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.blocks = set(program.metadata.get("blocks", ()))

    def apply(self) -> PassResult:
        changes: list[Change] = []
        refusals: list[Refusal] = []
        alone: set[str] = {path for region in self.program.regions for path in region.instances if path in self.blocks}
        for region in self.program.regions:
            units = self._units(region)
            if len(units) < 2:
                continue
            alone -= {self._path(region, node) for node in units}
            for group in self._balanced(units):
                self._tag_span(region, group, changes, refusals)
        program = self.program
        if alone:
            refusals.append(Refusal(min(alone, key=_natural), ALONE))
            result = _tag_instances(program, alone)
            program, changes, refusals = result.program, [*changes, *result.changes], [*refusals, *result.refusals]
        if not changes and not refusals and _is_whole(program):
            reason = "the model's graph calls too few modules in a row to make segments of; name modules with select="
            refusals.append(Refusal("", reason))
        return PassResult(program, bool(changes), tuple(changes), tuple(refusals))

    def _path(self, region: Region, node: Node) -> str:
        return f"{region.path}.{node.target}".lstrip(".")

    def _units(self, region: Region) -> list[Node]:
        """The calls to make segments of: of blocks, or, in a model without blocks, of any module."""
        if region.path in self.blocks:
            return []
        called = [node for node in region.nodes() if node.op == "call_module" and not node.meta.get("hooked")]
        blocks = [node for node in called if self._path(region, node) in self.blocks]
        if self.blocks:
            return [node for node in blocks if not _takes_object(node)]
        return called if len(called) >= 4 else []

    def _balanced(self, units: list[Node]) -> list[list[Node]]:
        """Consecutive groups of about equal weight, as many as the square root of their number."""
        weights = [self._weight(node) for node in units]
        count = math.ceil(math.sqrt(len(units)))
        groups: list[list[Node]] = [[] for _ in range(count)]
        total, so_far = sum(weights), 0.0
        for node, weight in zip(units, weights, strict=True):
            middle = so_far + weight / 2
            groups[min(count - 1, int(count * middle / total))].append(node)
            so_far += weight
        return [group for group in groups if group]

    def _weight(self, node: Node) -> float:
        """Bytes of the values a call makes inside, for the example inputs; at least one."""
        path = str(node.target)
        for region in self.program.regions:
            if any(instance == path or instance.endswith(f".{path}") for instance in region.instances):
                return 1.0 + sum(_bytes(inner) for inner in region.nodes() if inner.op.startswith("call"))
        return 1.0 + _bytes(node)

    def _tag_span(self, region: Region, group: list[Node], changes: list[Change], refusals: list[Refusal]) -> None:
        nodes = list(region.nodes())
        span = nodes[nodes.index(group[0]) : nodes.index(group[-1]) + 1]
        first, last = (self._path(region, node) for node in (group[0], group[-1]))
        several = f"{first} to {last}, {len(group)} in a row, " if len(group) > 1 else f"{first} "
        summary = f"recompute {several}in the backward"
        _tag(region, {node.name for node in span}, changes, refusals, summary)


def _bytes(node: Node) -> int:
    made = _tensors(node.meta.get("val"))
    return sum(math.prod(map(_hint, tensor.shape)) * tensor.element_size() for tensor in made)


def _hint(size: Any) -> int:
    hint = getattr(getattr(size, "node", None), "hint", size)
    return int(hint) if hint is not None else 1


def _takes_object(node: Node) -> bool:
    """Whether a call is given a Python object that it may change, such as a key-value cache."""
    return any(_is_effect(source) or source.meta.get("object") for source in node.all_input_nodes)


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]
