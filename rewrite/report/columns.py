"""Lines of fixed columns that fit the width they are given."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from rich.text import Text

from rewrite.report.sizes import dtype_text, shape_text, size_text

STYLES = {"-": "red", "+": "green", "~": "yellow", " ": ""}
WIDE = 110
"""Columns from which the user's source line stands beside the bytes."""
NARROW = 64
"""Columns below which shape and dtype are left out."""
SOURCE_WIDTH = 28
PRINTED_WIDTH = 100
"""Columns of what `print` shows in Python."""


def node_columns(
    width: int,
    mark: str,
    action: str,
    label: str,
    shape: tuple[int, ...] | None = None,
    dtype: str = "",
    size: str = "",
    source: str = "",
) -> Text:
    """`-keep      mlp.gate_proj     1x4096x11008  f32    172 MiB` in exactly the columns that `width` leaves."""
    with_source, with_shape = width >= WIDE, width >= NARROW
    fixed = 22 + (22 if with_shape else 0) + (SOURCE_WIDTH + 2 if with_source else 0)
    line = f"{mark}{action:<9} {crop(label, max(8, width - fixed)):<{max(8, width - fixed)}}"
    if with_shape:
        shown = "" if shape is None or not dtype else shape_text(shape)
        line += f" {crop(shown, 16):>16} {dtype_text(dtype):<4}"
    line += f" {size:>10}"
    if with_source and source:
        line += f"  {crop(source, SOURCE_WIDTH)}"
    return Text(line.rstrip(), style=STYLES.get(mark, ""))


def crop(text: str, width: int) -> str:
    """The end of `text` where it is too long: the end of a path says most."""
    return text if len(text) <= width else ".." + text[len(text) - width + 2 :]


def sized(count: int) -> str:
    """Bytes for a column; empty for none."""
    return size_text(count) if count else ""


def wrapped(text: str, width: int, indent: str = "") -> list[Text]:
    """A sentence over as many lines as it needs, each but the first behind `indent`; its own indent is kept."""
    first = text[: len(text) - len(text.lstrip())]
    told = textwrap.wrap(
        text,
        max(width, 20),
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [Text(line) for line in told]


def wrapped_behind(name: str, text: str, column: int, width: int) -> Iterator[Text]:
    """`name` in a column of its own, `text` beside it."""
    lines = wrapped(text, max(20, width - column))
    for position, line in enumerate(lines or [Text("")]):
        yield Text(f"{name if position == 0 else '':<{column}}").append_text(line)


def plain(lines: Iterable[Text]) -> str:
    """Lines as a text without colours, for `print` in Python."""
    return "\n".join(line.plain for line in lines)
