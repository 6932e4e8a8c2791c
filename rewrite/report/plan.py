"""A plan as text: the passes, the figures of the step, what else could have been had, and what holds the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.text import Text

from rewrite.report.columns import crop, wrapped
from rewrite.report.sizes import delta_text, percent_text, size_text
from rewrite.report.step import caveat_lines, peak_lines

if TYPE_CHECKING:
    from rewrite.memory.timeline import Estimate
    from rewrite.plan.document import Plan

BAR = 24
"""Most columns of a bar of the plot."""


def plan_lines(plan: Plan, width: int) -> Iterator[Text]:
    """The whole plan; the line with the spec is whole, however long, to be copied."""
    yield Text(crop(f"--- {plan.model}", width), "bold")
    yield Text(f"+++ {plan.spec or 'no pass'}", "bold")
    yield Text("")
    yield from figure_lines(plan, width)
    yield Text("")
    yield from frontier_lines(plan, width)
    yield Text("")
    yield from limit_lines(plan, width)
    yield Text("")
    yield Text(
        f"device {plan.after.device}, optimizer {plan.after.optimizer or 'none'}, numerics {plan.numerics.value}"
    )
    yield from caveat_lines((plan.before, plan.after), width)


def figure_lines(plan: Plan, width: int) -> Iterator[Text]:
    """Budget, peak, saved bytes and predicted time."""
    yield Text(f"{'budget':<10} {size_text(plan.budget_bytes):>10}")
    yield _change_line("peak", plan.before.peak_bytes, plan.after.peak_bytes)
    yield _change_line("saved", plan.before.saved_bytes, plan.after.saved_bytes)
    ratio = f"x{plan.time_ratio:.2f}"
    yield from wrapped(f"{'time':<10} {ratio:>10} a step, predicted from peak rates of {plan.profile}", width, " " * 22)


def _change_line(name: str, before: int, after: int) -> Text:
    line = f"{name:<10} {size_text(before):>10} -> {size_text(after):>10}  "
    return Text(line + f"{delta_text(after - before):>11}  {percent_text(after - before, before)}".rstrip())


def frontier_lines(plan: Plan, width: int) -> Iterator[Text]:
    """Peak against time: a bar for each peak, the time it takes, and the passes; `>` marks the plan."""
    yield Text("least time by peak, predicted", "bold")
    rows = {size_text(each.peak_bytes): each for each in (*plan.frontier, plan.chosen)}
    highest = max(each.peak_bytes for each in rows.values())
    for size, each in sorted(rows.items(), key=lambda row: -row[1].peak_bytes):
        bar = "#" * max(1, round(BAR * each.peak_bytes / highest))
        mark, style = (">", "green") if each is plan.chosen else (" ", "")
        line = f"{mark} {size:>9}  {f'x{each.time_ratio:.2f}':>6} {bar:<{BAR}} "
        yield Text(line + crop_end(each.names or "no pass", max(8, width - len(line))), style)


def crop_end(text: str, width: int) -> str:
    """The start of `text` where it is too long."""
    return text if len(text) <= width else text[: width - 2] + ".."


def limit_lines(plan: Plan, width: int) -> Iterator[Text]:
    """What the lowest peak consists of."""
    yield from peak_lines("lowest peak", plan.floor, width)
    held = [(name, count) for name, count in sorted(plan.floor.by_category.items(), key=lambda each: -each[1]) if count]
    told = ", ".join(f"{name} {size_text(count)}" for name, count in held)
    yield from wrapped(f"  there: {told}", width, "    ")
    stays = _stays(plan.floor)
    if stays:
        share = f"{100 * stays / plan.floor.peak_bytes:.0f}%"
        yield from wrapped(f"  parameters, gradients, inputs and optimizer state are {share} of it", width, "    ")


def _stays(floor: Estimate) -> int:
    kinds = ("parameter", "buffer", "input", "gradient", "optimizer")
    return sum(floor.by_category.get(kind, 0) for kind in kinds)
