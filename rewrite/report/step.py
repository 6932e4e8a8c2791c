"""A step's memory in words: the peak, where it is, what is alive there, what is not counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from rewrite.report.columns import crop, wrapped
from rewrite.report.ranges import fold_paths
from rewrite.report.sizes import delta_text, dtype_text, flops_text, percent_text, shape_text, size_text

if TYPE_CHECKING:
    from rewrite.diff.model import GraphDiff
    from rewrite.memory.timeline import Estimate, Held

LARGEST = 5


def stat_lines(diff: GraphDiff) -> Iterator[Text]:
    """Peak, saved bytes, recompute and predicted time, before and after."""
    before, after = diff.before, diff.after
    yield _change_line("peak", before.peak_bytes, after.peak_bytes)
    yield _change_line("saved", before.saved_bytes, after.saved_bytes)
    if any(line.stored_bits for hunk in diff.hunks for line in hunk.lines):
        yield _change_line("weights", _weight_bytes(before), _weight_bytes(after))
    yield from _cast_lines(diff)
    flops = diff.recompute_flops
    share = percent_text(flops, before.flops.total)
    yield Text(f"recompute  {'+' if flops >= 0 else ''}{flops_text(flops)} a step  {share}".rstrip())
    if diff.time_ratio is not None:
        yield Text(f"time       x{diff.time_ratio:.2f} a step, predicted from peak rates of {diff.profile}")


def _cast_lines(diff: GraphDiff) -> Iterator[Text]:
    """How many casts there are more, and what they write."""
    for count in diff.casts:
        arrow = f"{dtype_text(count.from_dtype)} -> {dtype_text(count.to_dtype)}"
        if count.count:
            yield Text(f"casts      {arrow}  {count.count:+d} a forward, {size_text(count.bytes)}")
        if count.weights:
            yield Text(f"casts      {arrow}  {count.weights:+d} weights once a step, {size_text(count.weight_bytes)}")


def _weight_bytes(estimate: Estimate) -> int:
    """Parameters, and the buffers that scales are among."""
    return estimate.by_category.get("parameter", 0) + estimate.by_category.get("buffer", 0)


def _change_line(name: str, before: int, after: int) -> Text:
    line = Text(f"{name:<10} {size_text(before):>10} -> {size_text(after):>10}  ")
    style = "green" if after < before else "red" if after > before else ""
    return line.append(f"{delta_text(after - before):>11}  {percent_text(after - before, before)}".rstrip(), style)


def peak_lines(title: str, estimate: Estimate, width: int) -> Iterator[Text]:
    """Where the peak is, and the largest storages alive at it."""
    peak = estimate.peak
    place = _place_text(peak.module_path or peak.region, peak.node, " at ")
    told = f"{title}: {size_text(peak.bytes)} in {peak.phase}"
    yield Text(f"{told}, {crop(place, max(8, width - len(told) - 2))}" if place else told, "bold")
    for group in _alike(peak.largest)[:LARGEST]:
        yield Text(_held_text(group, width))


def _alike(largest: tuple[Held, ...]) -> list[list[Held]]:
    """Storages of one size, type and category together, the largest sum first."""
    groups: dict[tuple[object, ...], list[Held]] = {}
    for held in largest:
        groups.setdefault((held.bytes, held.shape, held.dtype, held.category), []).append(held)
    return sorted(groups.values(), key=lambda group: -sum(held.bytes for held in group))


def _held_text(group: list[Held], width: int) -> str:
    held = group[0]
    size = f"{size_text(held.bytes)}{f' x{len(group)}' if len(group) > 1 else ''}"
    shape = f"{shape_text(held.shape)} {dtype_text(held.dtype)}"
    place = fold_paths(dict.fromkeys(_place_text(held.module_path, held.node, " ") for held in group))
    line = f"  {size:>13}  {held.category:<9}  {shape:<20}  "
    return (line + crop(place, max(8, width - len(line)))).rstrip()


def _place_text(module_path: str, node: str, between: str) -> str:
    """Module path and node; the path alone where the node is named after it."""
    if module_path.replace(".", "_").endswith(node.strip("_")):
        return module_path
    return f"{module_path}{between}{node}" if module_path else node


def category_lines(estimate: Estimate) -> Iterator[Text]:
    """The bytes at the peak by what they are held for, the largest first."""
    for category, count in sorted(estimate.by_category.items(), key=lambda item: -item[1]):
        if count:
            share = 100 * count / (estimate.peak_bytes or 1)
            yield Text(f"  {category:<10} {size_text(count):>10}  {share:5.1f}%")


def caveat_lines(estimates: tuple[Estimate, ...], width: int) -> Iterator[Text]:
    """What was assumed, and what the figures leave out."""
    for name, field in (("Assumed", "assumptions"), ("Not counted", "not_counted")):
        sentences = dict.fromkeys(sentence for estimate in estimates for sentence in getattr(estimate, field))
        if sentences:
            yield from wrapped(f"{name}: {'; '.join(sentences)}", width, "  ")
