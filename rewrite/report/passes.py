"""The passes there are, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from rewrite.options import REQUIRED, annotation_text
from rewrite.report.columns import wrapped, wrapped_behind

if TYPE_CHECKING:
    from rewrite.options import Option
    from rewrite.registry import Description


def list_lines(descriptions: Sequence[Description], width: int) -> Iterator[Text]:
    """One paragraph a pass: name, numerics, summary."""
    column = max((len(each.name) for each in descriptions), default=0) + 2
    for each in descriptions:
        told = f"cannot be loaded: {each.fault}" if each.fault else f"{each.summary} [{_numerics_text(each)}]"
        yield from wrapped_behind(each.name, told, column, width)


def pass_lines(description: Description, width: int) -> Iterator[Text]:
    """One pass in full: its documentation, its promise and its options with their defaults."""
    yield Text(description.name, "bold")
    if description.fault:
        yield from wrapped(f"cannot be loaded: {description.fault}", width)
        return
    for paragraph in description.doc.split("\n\n"):
        yield from wrapped(paragraph, width)
        yield Text("")
    yield Text(f"numerics   {_numerics_text(description)}")
    yield Text(f"from       {description.distribution}")
    if not description.options:
        return
    yield Text("")
    yield Text("options", "bold")
    column = max(len(each.name) for each in description.options) + 4
    for option in description.options:
        told = f"{annotation_text(option.annotation)}; {default_text(option)}. {option.doc}".strip()
        yield from wrapped_behind(f"  {option.name}", told, column, width)
    yield from _table_lines(description)


def _table_lines(description: Description) -> Iterator[Text]:
    """The values of an option side by side, one property of theirs a line; then what the options given come to."""
    if description.table:
        yield Text("")
        yield Text(f"{description.table[0][0]}s", "bold")
        columns = [list(column) for column in zip(*description.table, strict=True)]
        columns[0][0] = ""
        widths = [max(map(len, row)) + 2 for row in description.table]
        for column in columns:
            cells = [f"{cell:<{width}}" for cell, width in zip(column, widths, strict=True)]
            yield Text(f"  {''.join(cells)}".rstrip())
    if description.settings:
        yield Text("")
        yield Text("with these options", "bold")
        width = max(map(len, description.settings)) + 2
        for name, value in description.settings.items():
            yield Text(f"  {name:<{width}}{value}")


def _numerics_text(description: Description) -> str:
    return description.numerics.value if description.numerics is not None else "unknown"


def default_text(option: Option) -> str:
    """`default 2`, or that the option must be given."""
    if option.default is REQUIRED:
        return "must be given"
    if isinstance(option.default, bool) or option.default is None:
        return f"default {str(option.default).lower()}"
    return f"default {option.default}"
