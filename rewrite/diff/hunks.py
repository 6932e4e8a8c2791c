"""Folds what changed, instance by instance, into one hunk for all the instances that changed alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import fx

from rewrite.diff.kept import Kept, KeptByInstance, kept_by_instance, serving
from rewrite.diff.lines import NOTHING, cast_from, dtype_change, node_line, outside_line, tags_of, value_type
from rewrite.diff.model import Hunk, NodeLine
from rewrite.memory.timeline import Estimate
from rewrite.program import RECOMPUTE, Program, Region
from rewrite.text import argument_text, target_text
from rewrite.weight_casts import cast_weight


def hunks_between(before: Program, after: Program, was: Estimate, now: Estimate) -> tuple[Hunk, ...]:
    """The hunks of every region, unchanged ones too, in the order of the program."""
    kept_before, kept_after = kept_by_instance(before, was), kept_by_instance(after, now)
    origins = serving(before)
    found = []
    for region, paths in _served(after):
        for instances in _alike(paths, origins, kept_before, kept_after):
            first = instances[0]
            lines = tuple(changed_lines(origins[first], region, kept_before.get(first, {}), kept_after.get(first, {})))
            found.append(_folded(region, instances, lines, kept_before, kept_after))
    return _merged(found)


def hunks_of(program: Program, estimate: Estimate) -> tuple[Hunk, ...]:
    """Every region of one program with what each node keeps."""
    kept = kept_by_instance(program, estimate)
    found = []
    for region, paths in _served(program):
        for instances in _alike(paths, serving(program), kept, kept):
            lines = tuple(_region_lines(region, kept.get(instances[0], {})))
            found.append(_folded(region, instances, lines, kept, kept))
    return _merged(found)


def _served(program: Program) -> Iterator[tuple[Region, tuple[str, ...]]]:
    """Each region with the instances that run it."""
    regions = serving(program)
    for region in program.regions:
        yield region, tuple(path for path in region.instances if regions[path] is region)


def _merged(hunks: list[Hunk]) -> tuple[Hunk, ...]:
    """Hunks of one class with the same lines as one: variants of a block differ in what no line shows."""
    groups: dict[tuple[str, tuple[NodeLine, ...]], list[Hunk]] = {}
    for hunk in hunks:
        groups.setdefault((hunk.class_name, hunk.lines), []).append(hunk)
    return tuple(
        replace(
            group[0],
            instances=tuple(path for hunk in group for path in hunk.instances),
            before_bytes=sum(hunk.before_bytes for hunk in group),
            after_bytes=sum(hunk.after_bytes for hunk in group),
        )
        for group in groups.values()
    )


def _alike(
    paths: tuple[str, ...], origins: Mapping[str, Region], before: KeptByInstance, after: KeptByInstance
) -> Iterator[tuple[str, ...]]:
    """Instances of one region, grouped by what they were and what they keep."""
    groups: dict[object, list[str]] = {}
    for path in paths:
        key = (origins[path].path, tuple(before.get(path, {}).items()), tuple(after.get(path, {}).items()))
        groups.setdefault(key, []).append(path)
    for alike in groups.values():
        yield tuple(alike)


def _folded(
    region: Region, instances: tuple[str, ...], lines: tuple[NodeLine, ...], was: KeptByInstance, now: KeptByInstance
) -> Hunk:
    return Hunk(
        path=instances[0],
        instances=instances,
        class_name=region.class_name,
        lines=lines,
        before_bytes=sum(kept.bytes for path in instances for kept in was.get(path, {}).values()),
        after_bytes=sum(kept.bytes for path in instances for kept in now.get(path, {}).values()),
        recomputed_nodes=sum(RECOMPUTE in node.meta for node in region.graph.nodes if node.op.startswith("call")),
    )


def _region_lines(region: Region, kept: Mapping[str, Kept]) -> Iterator[NodeLine]:
    names = set()
    for node in region.graph.nodes:
        names.add(node.name)
        if node.op != "output":
            yield node_line(region, node, kept.get(node.name, NOTHING))
    for name, outside in kept.items():
        if name not in names:
            yield outside_line(name, outside)


def changed_lines(
    origin: Region, region: Region, was: Mapping[str, Kept], now: Mapping[str, Kept]
) -> Iterator[NodeLine]:
    """The lines of one instance: nodes by name, in graph order, then what stands in no graph."""
    old = {node.name: node for node in origin.graph.nodes}
    new = {node.name: node for node in region.graph.nodes}
    waiting = iter(old.values())
    for node in new.values():
        if node.op == "output":
            continue
        if node.name in old:
            for earlier in waiting:
                if earlier.name == node.name:
                    break
                if earlier.name not in new:
                    yield _dropped(origin, earlier, was)
        yield from _node_changes(region, old.get(node.name), node, was, now)
    for name in {**was, **now}:
        if name not in old and name not in new:
            line = outside_line(name, was.get(name, now.get(name, NOTHING)))
            yield weighed(line, was.get(name, NOTHING), now.get(name, NOTHING))


def _dropped(origin: Region, node: fx.Node, was: Mapping[str, Kept]) -> NodeLine:
    cast = cast_from(node)
    line = node_line(origin, node, was.get(node.name, NOTHING), "-", "cast" if cast else "drop")
    return replace(line, after_bytes=0, was_dtype=cast)


def _node_changes(
    region: Region, old: fx.Node | None, node: fx.Node, was: Mapping[str, Kept], now: Mapping[str, Kept]
) -> Iterator[NodeLine]:
    before, after = was.get(node.name, NOTHING), now.get(node.name, NOTHING)
    line = node_line(region, node, before if before.bytes else after)
    if old is None:
        yield _added(replace(line, mark="+", before_bytes=0, after_bytes=after.bytes), node)
        return
    had = dtype_change(old, node)
    weight = replace(weighed(line, before, after), was_dtype=had)
    was_tagged, tagged = tags_of(old), tags_of(node)
    if had and (weight.mark in (" ", "~") or _call_text(old) != _call_text(node)):
        yield replace(weight, mark="~", action="dtype", dtype=value_type(node.meta.get("val"))[1])
    elif _call_text(old) != _call_text(node):
        yield replace(weight, mark="~", action="rewire")
    elif weight.mark == " " and was_tagged != tagged and not before.bytes:
        yield replace(weight, mark="+" if RECOMPUTE in tagged else "~", action=_tag_action(was_tagged, tagged))
    else:
        yield weight


def _added(line: NodeLine, node: fx.Node) -> NodeLine:
    cast = cast_from(node)
    if cast:
        return replace(line, action="cast", was_dtype=cast, weight=node.target is cast_weight)
    return replace(line, action="read" if node.op == "get_attr" else "add")


def weighed(line: NodeLine, before: Kept, after: Kept) -> NodeLine:
    """`line` with the bytes of both sides and the mark they give it."""
    mark = " " if before.bytes == after.bytes else "-" if not after.bytes else "+" if not before.bytes else "~"
    return replace(line, mark=mark, before_bytes=before.bytes, after_bytes=after.bytes)


def _tag_action(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return "keep" if RECOMPUTE in old and RECOMPUTE not in new else changed[0]


def _call_text(node: fx.Node) -> tuple[str, ...]:
    return node.op, target_text(node.target), argument_text(node.args), argument_text(dict(node.kwargs))
