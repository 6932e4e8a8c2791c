"""What every pass promises about the program it returns, checked."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from rewrite.contract import PassResult
from rewrite.program import Program, Region
from rewrite.tags import RECOMPUTE
from rewrite.text import argument_text, program_text, value_text


@dataclass(frozen=True)
class BrokenPromise:
    """A way in which a pass did other than it said."""

    cause: str
    remedy: str
    """What its developer should do."""


def broken_promise(program: Program, text: str, result: Any) -> BrokenPromise | None:
    """The first promise that a pass broke when it made `result` out of a copy of `program`, if any.

    `text` is the canonical text of `program` from before the pass ran.
    """
    if not isinstance(result, PassResult):
        return BrokenPromise(f"apply() returned {_a(result)}, not a PassResult", "return PassResult(program, modified)")
    if not isinstance(result.program, Program):
        return BrokenPromise(f"the result holds {_a(result.program)}, not a Program", "return the program it was given")
    if program_text(program) != text:
        cause = f"it changed the program from before it in place: {_first_difference(text, program_text(program))}"
        return BrokenPromise(cause, "change only the program that apply() is given")
    return _lost_instances(program, result.program) or _broken_region(program, result.program) or _lie(text, result)


def _lie(text: str, result: PassResult) -> BrokenPromise | None:
    after = program_text(result.program)
    if not result.modified and after != text:
        cause = f"it says modified=False, but the program changed: {_first_difference(text, after)}"
        return BrokenPromise(cause, "return modified=True when anything changed")
    if result.modified and after == text:
        cause = "it says modified=True, but nothing in the program changed"
        return BrokenPromise(cause, "return modified=False, with a refusal that says why")
    return None


def _lost_instances(before: Program, after: Program) -> BrokenPromise | None:
    had = sorted(path for region in before.regions for path in region.instances)
    has = sorted(path for region in after.regions for path in region.instances)
    remedy = "keep every instance in exactly one region; Program.split() gives some a graph of their own"
    if had != has:
        lost, extra = _surplus(had, has), _surplus(has, had)
        told = [f"lost {', '.join(map(repr, lost))}"] if lost else []
        told += [f"added {', '.join(map(repr, extra))}"] if extra else []
        return BrokenPromise(f"the regions' instances changed: {'; '.join(told)}", remedy)
    empty = [region.path for region in after.regions if region.path not in region.instances]
    return BrokenPromise(f"region {empty[0]!r} is not among its own instances", remedy) if empty else None


def _broken_region(before: Program, after: Program) -> BrokenPromise | None:
    for region in after.regions:
        had = [each for each in before.regions if region.path in each.instances]  # several, if called in several ways
        for check in (_invalid_graph, _invalid_tag):
            broken = check(region)
            if broken is not None:
                return broken
        for part, signature in _SIGNATURES.items():
            if signature(region.graph) not in map(signature, (each.graph for each in had)):
                cause = f"the {part} of region {region.path!r} changed from {signature(had[0].graph)} to "
                return BrokenPromise(cause + signature(region.graph), f"leave the {part} of a region as they are")
    return None


def _invalid_graph(region: Region) -> BrokenPromise | None:
    try:
        region.graph.lint()
    except Exception as fault:  # noqa: BLE001 - lint raises whatever it meets in a broken graph
        cause = f"the graph of region {region.path!r} is not valid: {fault}"
        return BrokenPromise(cause, "keep every node after its inputs, names apart, and erase no node that is used")
    return None


def _invalid_tag(region: Region) -> BrokenPromise | None:
    for node in region.graph.nodes:
        segment = node.meta.get(RECOMPUTE, 0)
        if not isinstance(segment, int) or isinstance(segment, bool):
            cause = f"node {node.name} of region {region.path!r} is tagged {RECOMPUTE}={segment!r}, not an int"
            return BrokenPromise(cause, "number the segments")
    return None


def _inputs(graph: fx.Graph) -> str:
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    shown = (f"{node.target}: {value_text(node.meta.get('val'))}{_default(node)}" for node in nodes)
    return f"({', '.join(shown)})"


def _default(node: fx.Node) -> str:
    return f" = {argument_text(node.args[0])}" if node.args else ""


def _outputs(graph: fx.Graph) -> str:
    """The outputs' structure, with each node in it shown as the type of its value."""
    returned = [node.args[0] for node in graph.nodes if node.op == "output"]
    return ", ".join(argument_text(value, _type) for value in returned) or "nothing"


def _type(node: fx.Node) -> str:
    return value_text(node.meta.get("val"))


_SIGNATURES: dict[str, Callable[[fx.Graph], str]] = {"inputs": _inputs, "outputs": _outputs}


def _surplus(left: list[str], right: list[str]) -> list[str]:
    rest = list(right)
    surplus = []
    for path in left:
        if path in rest:
            rest.remove(path)
            continue
        surplus.append(path)
    return surplus


def _first_difference(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), lineterm="", n=0)
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("---", "+++")]
    return "".join(f"\n    {line}" for line in changed[:2])


def _a(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
