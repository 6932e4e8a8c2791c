"""A model's graphs with what each node keeps for the backward, layers folded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from rewrite.report.columns import WIDE, crop, sized
from rewrite.report.diff import opaque_lines
from rewrite.report.ranges import fold_paths
from rewrite.report.sizes import dtype_text, shape_text, size_text
from rewrite.report.step import category_lines, caveat_lines, peak_lines

if TYPE_CHECKING:
    from rewrite.diff.model import Hunk, NodeLine, View

SOURCE = 24


def show_lines(view: View, width: int) -> Iterator[Text]:
    """Every region, then the step's memory."""
    yield Text(crop(view.model, width), "bold")
    for hunk in view.hunks:
        yield from _region_lines(hunk, width)
    yield Text("")
    estimate = view.estimate
    yield Text(f"saved      {size_text(estimate.saved_bytes):>10}  kept from forward to backward")
    yield Text(f"peak       {size_text(estimate.peak_bytes):>10}")
    yield from category_lines(estimate)
    yield from peak_lines("peak", estimate, width)
    yield from opaque_lines(view.opaque, width)
    yield Text("")
    yield Text(f"device {estimate.device}, optimizer {estimate.optimizer or 'none'}")
    yield from caveat_lines((estimate,), width)


def _region_lines(hunk: Hunk, width: int) -> Iterator[Text]:
    times = f" x{len(hunk.instances)}" if len(hunk.instances) > 1 else ""
    title = f"{hunk.class_name}{times}  keeps {size_text(hunk.after_bytes)}"
    yield Text("")
    yield Text(f"{crop(fold_paths(hunk.instances), max(12, width - len(title) - 2))}  {title}", "cyan")
    for line in hunk.lines:
        yield node_text(line, width)


def node_text(line: NodeLine, width: int) -> Text:
    """Label, shape, dtype, size of the value where there is room, bytes kept, the user's line."""
    with_value = width >= WIDE
    label = max(10, width - 2 - 18 - 5 - 11 - (11 if with_value else 0) - (SOURCE + 2))
    shape = shape_text(line.shape) if line.dtype else ""
    text = f"  {crop(line.label, label):<{label}} {crop(shape, 16):>16} {dtype_text(line.dtype):<4}"
    if with_value:
        text += f" {sized(line.value_bytes):>10}"
    text += f" {sized(line.after_bytes):>10}  {crop(line.source, SOURCE)}"
    return Text(text.rstrip())
