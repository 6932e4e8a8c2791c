"""A diff as text: hunks by module path, then the figures of the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from rewrite.report.columns import crop, node_columns, sized, wrapped
from rewrite.report.ranges import fold_paths, natural_order
from rewrite.report.sizes import delta_text, dtype_text, size_text
from rewrite.report.step import caveat_lines, peak_lines, stat_lines

if TYPE_CHECKING:
    from rewrite.diff.model import GraphDiff, Hunk, NodeLine

SMALL = 0.01
"""A line that holds less than this share of its hunk is folded into one with the others like it."""


def diff_lines(diff: GraphDiff, width: int, *, full: bool = False) -> Iterator[Text]:
    """The whole diff; `full` keeps the small lines apart and shows what stayed."""
    yield Text(crop(f"--- {diff.model}", width), "bold")
    yield Text(crop(f"+++ {','.join(record.spec for record in diff.passes) or 'no pass'}", width), "bold")
    for hunk in diff.hunks:
        yield from _hunk_lines(hunk, width, full=full)
    if not diff.hunks:
        yield Text("nothing changes")
    yield Text("")
    yield from summary_lines(diff, width)


def summary_lines(diff: GraphDiff, width: int) -> Iterator[Text]:
    """The figures of the step, where its peak is, and what was left alone."""
    yield from stat_lines(diff)
    yield Text("")
    yield from peak_lines("peak before", diff.before, width)
    yield from peak_lines("peak after", diff.after, width)
    yield from left_alone(diff, width)
    yield Text("")
    yield Text(f"device {diff.after.device}, optimizer {diff.after.optimizer or 'none'}")
    yield from caveat_lines((diff.before, diff.after), width)


def stat_view(diff: GraphDiff, width: int) -> Iterator[Text]:
    """One line a hunk with a bar, as `git diff --stat` draws it, then the figures."""
    names = [fold_paths(hunk.instances) for hunk in diff.hunks]
    column = min(max((len(name) for name in names), default=0), max(20, width - 40))
    room = max(10, width - column - 16)
    largest = max((abs(hunk.saved_bytes) for hunk in diff.hunks), default=0) or 1
    for name, hunk in zip(names, diff.hunks, strict=True):
        bar = ("-" if hunk.saved_bytes >= 0 else "+") * max(1, round(room * abs(hunk.saved_bytes) / largest))
        if not hunk.saved_bytes:
            yield Text(f"{crop(name, column):<{column}} |")
            continue
        line = Text(f"{crop(name, column):<{column}} | {delta_text(-hunk.saved_bytes):>11} ")
        yield line.append(bar, "red" if hunk.saved_bytes > 0 else "green")
    yield from stat_lines(diff)


def changed_paths(diff: GraphDiff) -> Iterator[str]:
    """The module path of every instance that changes."""
    paths = {path for hunk in diff.hunks for path in hunk.instances}
    yield from (path or "(root)" for path in sorted(paths, key=natural_order))


def _hunk_lines(hunk: Hunk, width: int, *, full: bool) -> Iterator[Text]:
    times = f" x{len(hunk.instances)}" if len(hunk.instances) > 1 else ""
    saved = f"  {delta_text(-hunk.saved_bytes)}" if hunk.saved_bytes else ""
    title = f"{hunk.class_name}{times} @@{saved}"
    yield Text(f"@@ {crop(fold_paths(hunk.instances), max(12, width - len(title) - 4))} {title}", "cyan")
    shown, small = sorted_out(hunk.lines, full=full)
    for line in shown:
        yield _line_text(line, width)
    for mark in dict.fromkeys(line.mark for line in small):
        folded = [line for line in small if line.mark == mark]
        size = sum(abs(line.before_bytes - line.after_bytes) for line in folded)
        yield node_columns(width, mark, folded[0].action, f"({len(folded)} smaller values)", size=sized(size))
    if not full:
        yield from cast_lines(hunk.lines, width)
    yield from recompute_lines(hunk.lines, width)
    yield from detached_lines(hunk.lines, width)
    yield from stored_lines(hunk.lines, width)


def sorted_out(lines: Iterable[NodeLine], *, full: bool) -> tuple[list[NodeLine], list[NodeLine]]:
    """The lines to show, and the changed ones too small to show one by one."""
    counted = ("recompute", "detach", "held", "store")
    told = [line for line in lines if line.action not in counted and (full or line.mark != " " or line.after_bytes)]
    told = [line for line in told if full or not _is_counted_cast(line)]
    least = SMALL * sum(max(line.before_bytes, line.after_bytes) for line in told)
    large = [line for line in told if full or _is_large(line, least)]
    small = [line for line in told if not full and not _is_large(line, least) and line.mark != " "]
    return (large, small) if len(small) > 1 else ([line for line in told if line in large or line in small], [])


def _is_counted_cast(line: NodeLine) -> bool:
    """Whether a change of dtype is told in a sum with others: it holds no bytes for the backward, or is of a weight."""
    return line.weight or line.action == "read" or (line.action == "dtype" and not line.before_bytes + line.after_bytes)


def _is_large(line: NodeLine, least: float) -> bool:
    return max(line.before_bytes, line.after_bytes) >= max(least, 1) or (line.mark in "+~" and not line.before_bytes)


def _line_text(line: NodeLine, width: int) -> Text:
    size = sized(line.before_bytes or line.after_bytes)
    notes = [_arrow(line)] if line.action in ("cast", "dtype") else []
    if line.action == "cast":
        size = sized(line.value_bytes)
    if line.mark == "~" and line.before_bytes and line.after_bytes:
        size = size_text(line.after_bytes)
        if line.after_bytes != line.before_bytes or not notes:
            notes.append(delta_text(line.after_bytes - line.before_bytes))
    label = f"{line.label} ({', '.join(notes)})" if notes else line.label
    return node_columns(width, line.mark, line.action, label, line.shape, line.dtype, size, line.source)


def _arrow(line: NodeLine) -> str:
    return f"{dtype_text(line.was_dtype)} -> {dtype_text(line.dtype)}"


def cast_lines(lines: Iterable[NodeLine], width: int) -> Iterator[Text]:
    """The weights that are cast, and the operators that give another dtype and keep nothing, in sums."""
    counted = [line for line in lines if _is_counted_cast(line) and line.action != "read"]
    for (mark, action, arrow), members in _grouped(counted).items():
        few = len(members) == 1
        if action == "cast":
            told, size = f"{len(members)} {'weight' if few else 'weights'}, once a step ({arrow})", members
        else:
            told, size = f"{len(members)} {'operator' if few else 'operators'} ({arrow})", []
        yield node_columns(width, mark, action, told, size=sized(sum(line.value_bytes for line in size)))


def _grouped(lines: Iterable[NodeLine]) -> dict[tuple[str, str, str], list[NodeLine]]:
    groups: dict[tuple[str, str, str], list[NodeLine]] = {}
    for line in lines:
        groups.setdefault((line.mark, line.action, _arrow(line)), []).append(line)
    return groups


def recompute_lines(lines: Iterable[NodeLine], width: int) -> Iterator[Text]:
    """One line a segment: what runs again in the backward."""
    segments: dict[int, list[NodeLine]] = {}
    for line in lines:
        if line.segment is not None:
            segments.setdefault(line.segment, []).append(line)
    for members in segments.values():
        names = fold_paths(member.label for member in members)
        few = len(names.split(", ")) == 1
        what = names if few else f"{len(members)} operations"
        yield node_columns(width, "+", "recompute", f"{what}, in the backward")


def detached_lines(lines: Iterable[NodeLine], width: int) -> Iterator[Text]:
    """One line: what runs without autograd now."""
    count = sum(line.action == "detach" for line in lines)
    if count:
        yield node_columns(width, "~", "detach", f"{count} frozen operations, without autograd")


def stored_lines(lines: Iterable[NodeLine], width: int) -> Iterator[Text]:
    """One line for each width: the frozen weights stored in it."""
    for bits, count in sorted(Counter(line.stored_bits for line in lines if line.stored_bits).items()):
        yield node_columns(width, "~", "store", f"{count} frozen weights, in {bits} bits")


def left_alone(diff: GraphDiff, width: int) -> Iterator[Text]:
    """Refusals and opaque parts, each with where and why."""
    refusals = [(record.name, refusal) for record in diff.passes for refusal in record.refusals]
    if refusals:
        yield Text("")
        yield Text("refused", "bold")
        for name, refusal in refusals:
            where = f" ({refusal.source})" if refusal.source else ""
            yield from wrapped(f"  {name} at {refusal.path or '(root)'}{where}: {refusal.reason}", width, "    ")
    yield from opaque_lines(diff.opaque, width)


def opaque_lines(opaque: Iterable[object], width: int) -> Iterator[Text]:
    """The modules that run as their author wrote them; those with one cause together."""
    causes: dict[tuple[str, str], list[str]] = {}
    for part in opaque:
        causes.setdefault((getattr(part, "reason", ""), getattr(part, "source", "")), []).append(
            getattr(part, "path", "")
        )
    if causes:
        yield Text("")
        yield Text("opaque (runs as written, no graph)", "bold")
    for (reason, source), paths in causes.items():
        where = f" ({source})" if source else ""
        yield from wrapped(f"  {fold_paths(paths)}{where}: {reason}", width, "    ")
