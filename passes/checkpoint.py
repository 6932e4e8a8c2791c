"""Drop activations after the forward and compute them again in the backward.

`policy=blocks` recomputes each repeated block from its inputs; `policy=sqrt` recomputes segments of about
square-root of the depth blocks (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4);
`policy=cheap` keeps, in each block, the results of matrix work and recomputes the rest. With `budget`, the planner
chooses what each block keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from passes.budget import plans, within_budget
from passes.costly import keep_costly, keep_frozen
from passes.nodes import called_path, made_bytes, path_in, storages, takes_object
from passes.selection import patterns_of
from passes.spans import Tags
from rewrite import Numerics, Pass, PassError, PassResult, Refusal, SelectorError, matches

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite import Program, Region

POLICIES = ("blocks", "sqrt", "cheap")


@dataclass(frozen=True)
class Checkpoint(Pass):
    """Recompute parts of the model in the backward instead of keeping their activations."""

    policy: str = "blocks"
    """`blocks`: each repeated block by itself. `sqrt`: segments of about square-root of the depth blocks. `cheap`: of
    each block only what costs little: norms, activations, casts, dropouts and other elementwise work."""
    every: int = 1
    """With `blocks`: recompute every n-th block of each stack, starting with the first."""
    select: tuple[str, ...] | str | None = None
    """Module path globs (`encoder.layer.[0-5]`, `**.mlp`): recompute these modules, whatever the policy's blocks."""

    budget: str | int | None = None
    """Bytes (`6GiB`) that a training step may take, as `rewrite.estimate` counts them: what every block keeps is then
    chosen so that the step fits with the least recompute."""
    profile: str | None = None
    """With `budget`: the device whose peak rates price a recompute, such as h100; by default the one counted for."""

    name: ClassVar[str] = "checkpoint"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            subject = f"checkpoint{{policy={self.policy}}}"
            raise PassError(subject, "there is no such policy", f"choose one of {', '.join(POLICIES)}")
        if self.budget is not None and (self.policy != "blocks" or self.every != 1 or self.select is not None):
            cause = "a budget chooses what is kept: it goes without `policy`, `every` and `select`"
            raise PassError("checkpoint", cause, "leave the budget out, or the other options")
        if self.profile is not None and self.budget is None:
            raise PassError("checkpoint{profile=}", "a profile prices what a budget chooses", "give a budget too")
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            subject = f"checkpoint{{every={self.every}}}"
            raise PassError(subject, "every is a whole number from 1", "leave it out to recompute every block")
        if self.every > 1 and (self.policy != "blocks" or self.select is not None):
            cause = "`every` counts blocks: it goes with policy=blocks and without `select`"
            raise PassError("checkpoint", cause, "leave one of them out")
        patterns_of(self.name, self.select)

    def apply(self, program: Program) -> PassResult:
        """Tag the nodes to recompute; nodes that are tagged already stay as they are."""
        if self.budget is not None and plans(program):
            return within_budget(program, self.budget, self.profile)
        result = self._tagged(program)
        keep_frozen(result)
        if self.policy == "cheap":
            keep_costly(result)
        return result

    def within(self, budget: str | int, profile: str | None) -> Pass:
        """What this pass is called with when passes are chosen for a budget."""
        return Checkpoint(budget=budget, profile=profile)

    def _tagged(self, program: Program) -> PassResult:
        if self.select is not None:
            return self._selected(program, patterns_of(self.name, self.select))
        if self.policy == "sqrt":
            return _Segments(program).apply()
        return self._blocks(program)

    def _blocks(self, program: Program) -> PassResult:
        blocks = program.metadata.get("blocks", ())
        if not any(path in blocks for region in program.regions for path in region.instances):
            reason = (
                "the model has no stack of repeated blocks with a graph; use policy=sqrt, or name modules with select="
            )
            return PassResult(program, False, refusals=(Refusal("", reason),) if _is_first(program) else ())
        wanted = {path for stack in _stacks(blocks).values() for path in stack[:: self.every]}
        tags = Tags(program)
        return _result(_tag_instances(program, wanted, tags), tags)

    def _selected(self, program: Program, patterns: Sequence[str]) -> PassResult:
        tags = Tags(program)
        found: set[str] = set()
        summary = f"recompute what {', '.join(patterns)} selects"
        for region in program.regions:
            for parts, instances in _chosen(patterns, region, program):
                apart, part = program.split(program.left_of(region), tuple(instances))
                paths = [path_in(node, part, part.path) for node in part.nodes() if node.name in parts]
                found |= {pattern for pattern in patterns for path in paths if matches(pattern, path)}
                if tags.tag(part, parts, summary):
                    program = apart
        missing = [pattern for pattern in patterns if pattern not in found]
        if missing and _is_first(program):
            raise SelectorError(
                f"checkpoint{{select={missing[0]}}}",
                "it matches no module that a graph of the model runs",
                "give a path as named_modules() shows it, with * for one component and ** for any number",
            )
        return _result(program, tags)


def _result(program: Program, tags: Tags) -> PassResult:
    return PassResult(program, bool(tags.changes), tuple(tags.changes), tuple(tags.refusals))


def _is_first(program: Program) -> bool:
    """Whether the program is the whole model's; a later kind of call need not run everything that is wanted."""
    return bool(program.metadata.get("first", True))


def _chosen(patterns: Sequence[str], region: Region, program: Program) -> list[tuple[dict[str, str], list[str]]]:
    """Node name -> path of the selected module it is part of, with the instances for which it is so.

    A call of a module with a graph of its own is left to that graph.
    """
    graphs = {path for other in program.regions for path in other.instances}
    nodes = [node for node in region.nodes() if node.op != "call_module" or called_path(region, node) not in graphs]
    found: list[tuple[dict[str, str], list[str]]] = []
    for instance in region.instances:
        modules = [(node.name, _selected_module(patterns, path_in(node, region, instance))) for node in nodes]
        parts = {name: path[len(instance) :] for name, path in modules if path is not None}
        same = next((instances for known, instances in found if known == parts), None)
        if same is not None:
            same.append(instance)
        elif parts:
            found.append((parts, [instance]))
    return found


def _selected_module(patterns: Sequence[str], path: str) -> str | None:
    """The outermost module at or above `path` that a pattern selects."""
    components = path.split(".")
    above = (".".join(components[:length]) for length in range(1, len(components) + 1))
    return next((module for module in above if any(matches(pattern, module) for pattern in patterns)), None)


def _stacks(blocks: Iterable[str]) -> dict[str, list[str]]:
    """Block paths by the stack that holds them, in order."""
    stacks: dict[str, list[str]] = {}
    for path in blocks:
        stacks.setdefault(path.rpartition(".")[0], []).append(path)
    return stacks


def _tag_instances(program: Program, wanted: set[str], tags: Tags) -> Program:
    """Recompute each wanted block from its inputs."""
    reused = _inputs_written_later(program)
    summary = "recompute in the backward, from the block's inputs"
    for region in program.regions:
        taken = tuple(path for path in region.instances if path in wanted and path not in reused)
        tags.refusals += [Refusal(path, reused[path]) for path in region.instances if path in wanted and path in reused]
        if taken:
            apart, part = program.split(region, taken)
            if tags.tag(part, {node.name: part.path for node in part.nodes()}, summary):
                program = apart
    return program


def _inputs_written_later(program: Program) -> dict[str, str]:
    """Blocks whose input the graph around them changes in place after the call: it could not be recomputed from."""
    found: dict[str, str] = {}
    for region in program.regions:
        calls: list[tuple[str, set[int]]] = []
        for node in region.nodes():
            written = storages(other for other in region.nodes() if other.name in node.meta.get("writes", ()))
            for path, inputs in calls:
                if written & inputs:
                    found[path] = _written_later(node)
            if node.op == "call_module":
                calls.append((called_path(region, node), storages(node.all_input_nodes)))
    return found


def _written_later(node: Node) -> str:
    place = f" at {node.meta['source']}" if node.meta.get("source") else ""
    cause = f"its input is changed in place{place}, after the block has run"
    return f"{cause}; write that line without the in-place operation to have the block recomputed"


class _Segments:
    """Policy sqrt: cut the graph that calls the blocks into segments of about equal bytes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.blocks = set(program.metadata.get("blocks", ()))
        self.tags = Tags(program)

    def apply(self) -> PassResult:
        tags, program = self.tags, self.program
        alone = {path for region in program.regions for path in region.instances if path in self.blocks}
        for region in program.regions:
            units = self._units(region)
            if len(units) < 2:
                continue
            alone -= {called_path(region, node) for node in units}
            for group in self._balanced(units):
                self._tag_span(region, group)
        if alone:
            causes = {self._why_alone(path): path for path in sorted(alone, key=_natural, reverse=True)}
            tags.refusals += [Refusal(path, f"recomputed by itself, as {cause}") for cause, path in causes.items()]
            program = _tag_instances(program, alone, tags)
        if not tags.changes and not tags.refusals and _is_first(program):
            reason = "the model's graph calls too few modules in a row to make segments of; name modules with select="
            tags.refusals.append(Refusal("", reason))
        return _result(program, tags)

    def _units(self, region: Region) -> list[Node]:
        """The calls to make segments of: of blocks, or, in a model without blocks, of any module."""
        if region.path in self.blocks:
            return []
        called = [node for node in region.nodes() if node.op == "call_module" and not node.meta.get("hooked")]
        called = [node for node in called if called_path(region, node) not in self.tags.once]
        blocks = [node for node in called if called_path(region, node) in self.blocks]
        if self.blocks:
            return [node for node in blocks if not takes_object(node)]
        return called if len(called) >= 4 else []

    def _why_alone(self, path: str) -> str:
        """Why a block is in no segment of several."""
        if path in self.tags.once:
            return "a module in it has no graph, and its own Python must run once"
        graphs = self.program.regions
        calls = [node for region in graphs for node in region.nodes() if called_path(region, node) == path]
        if any(node.meta.get("hooked") for node in calls):
            return "its hooks, or those of a module in it, must fire once"
        if any(map(takes_object, calls)):
            return "it is given a cache: turn the cache off (use_cache=False) to have segments of several blocks"
        return "no graph calls several of these blocks in a row"

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
                return 1.0 + sum(made_bytes(inner) for inner in region.nodes() if inner.op.startswith("call"))
        return 1.0 + made_bytes(node)

    def _tag_span(self, region: Region, group: list[Node]) -> None:
        nodes = list(region.nodes())
        span = nodes[nodes.index(group[0]) : nodes.index(group[-1]) + 1]
        first, last = (called_path(region, node) for node in (group[0], group[-1]))
        several = f"{first} to {last}, {len(group)} in a row, " if len(group) > 1 else f"{first} "
        summary = f"recompute {several}in the backward"
        self.tags.tag(region, {node.name: first for node in span}, summary)


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]
