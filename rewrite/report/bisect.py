"""A bisection as text: what to paste, and the values near overflow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from rewrite.certificate import farthest
from rewrite.report.columns import crop, wrapped, wrapped_behind
from rewrite.report.ranges import fold_paths
from rewrite.report.sizes import dtype_text

if TYPE_CHECKING:
    from rewrite.bisect.result import Bisection
    from rewrite.value_range import Ranges, ValueRange

ROWS = 20
"""How many values near overflow are printed where not all are asked for: the worst."""


def bisect_lines(
    found: Bisection, ranges: Ranges | None, model: str, spec: str, width: int, *, full: bool
) -> Iterator[Text]:
    """Verdict, differences without and with what was found, the text to paste, and values near overflow."""
    yield Text(crop(f"{model}  {spec}", width), "bold")
    verdict, told = _verdict(found)
    for line in wrapped_behind(verdict, told, 11, width):
        line.stylize("bold green", 0, len(verdict))
        yield line
    allowed = "what rounding in each layer may come to"
    if found.tolerance is not None:
        allowed = f"{found.tolerance:g} of the largest magnitude of each output"
    yield from wrapped_behind("allowed", allowed, 11, width)
    yield from wrapped_behind("before", farthest(found.before), 11, width)
    if found.needed:
        yield from wrapped_behind("after", farthest(found.after), 11, width)
        yield Text("")
        yield Text(found.keep_fp32, "green")
        yield Text(f"-p '{found.spec}'")
    if ranges is not None:
        yield Text("")
        yield from range_lines(ranges, frozenset(found.candidates), width, full=full)


def _verdict(found: Bisection) -> tuple[str, str]:
    count = f"{found.trials} {'trial' if found.trials == 1 else 'trials'}"
    if not found.needed:
        return "MET", f"nothing needs to be kept in fp32 beside what the spec says; {count}"
    operators = f"{len(found.kept)} of {len(found.candidates)} operators in fp32 are enough"
    more = "and each of them is needed" if found.minimal else "fewer may do: --max-trials ended the search"
    return "FOUND", f"{operators}, {more}; {count}"


def range_lines(ranges: Ranges, low: frozenset[str], width: int, *, full: bool) -> Iterator[Text]:
    """One line for each value near the largest number of the precision, and whether it is computed in it.

    `low` holds the paths of the operators that are.
    """
    near = ranges.near
    short, limit = dtype_text(ranges.dtype), f"{ranges.limit:.6g}"
    if not near:
        text = f"range: each of {len(ranges.values)} values is below {ranges.share:g} of the largest {short}, {limit}"
        yield from wrapped(text, width)
    else:
        title = (
            f"range: {len(near)} of {len(ranges.values)} values above {ranges.share:g} of the largest {short}, {limit}"
        )
        yield from (line for each in wrapped(title, width) for line in [Text(each.plain, "bold")])
        yield Text(f"  {'':10} {'largest':>9}  {'in':<4}  where")
    for value in near if full else near[:ROWS]:
        yield _range_text(value, short if _is_low(value, low) else "f32", width)
    if len(near) > ROWS and not full:
        yield Text(f"  ({len(near) - ROWS} more; --full prints every one)")
    if ranges.unseen:
        yield from wrapped(f"not looked into: {fold_paths(ranges.unseen)}", width, "  ")


def _is_low(value: ValueRange, low: frozenset[str]) -> bool:
    """Whether a value is computed, or a weight is used, in the low precision."""
    return value.path in low or (value.operator == "parameter" and value.path.rpartition(".")[0] in low)


def _range_text(value: ValueRange, dtype: str, width: int) -> Text:
    line = f"  {value.state:<10} {value.largest:>9.4g}  {dtype:<4}  "
    said = value.path.endswith(f".{value.operator}")
    behind = "".join(f"  {each}" for each in ("" if said else value.operator, value.source) if each)
    style = "red" if dtype != "f32" and value.state != "near" else "yellow" if dtype != "f32" else ""
    return Text(line + crop(value.path, max(12, width - len(line) - len(behind))) + behind, style)
