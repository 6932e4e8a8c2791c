"""What to say of a budget that no plan fits: the lowest peak there is, what holds it there, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

from rewrite.errors import BudgetError
from rewrite.memory.timeline import Estimate, Held
from rewrite.report.sizes import size_text

STAYING = ("parameter", "buffer", "gradient", "optimizer")
"""What is held whatever the batch is."""
PLURALS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "input": "inputs",
    "gradient": "gradients",
    "saved": "values saved for the backward",
    "temporary": "temporaries",
    "optimizer": "optimizer state",
}
SHOWN = 3


def too_small(
    budget_bytes: int,
    lowest: Estimate,
    by: str = "recomputing",
    ways: Sequence[str] = ("another pass beside checkpoint",),
) -> BudgetError:
    """The error for a budget of `budget_bytes`; `by` is what reaches the `lowest` step, `ways` what else there is."""
    peak = lowest.peak
    asked, found = size_text(budget_bytes), size_text(peak.bytes)
    return BudgetError(
        f"budget {asked} ({budget_bytes} bytes)" if asked == found else f"budget {asked}",
        f"the lowest peak that {by} reaches is {found} ({peak.bytes} bytes), reached in the {peak.phase} of "
        f"{peak.module_path or 'the model itself'}, at {peak.node}: {_by_category(lowest)}; "
        f"the largest there: {_largest(peak.largest)}",
        f"give at least {peak.bytes} bytes, {_listed([*_smaller(lowest), *ways])}",
        peak.bytes,
    )


def _by_category(lowest: Estimate) -> str:
    most = sorted(lowest.by_category.items(), key=lambda each: -each[1])[:SHOWN]
    return ", ".join(f"{size_text(count)} of {PLURALS[category]}" for category, count in most if count)


def _largest(held: Sequence[Held]) -> str:
    """The largest storages, equal ones in one."""
    counted: dict[str, int] = {}
    for each in held:
        name = each.module_path or each.node or "the model itself"
        text = f"{size_text(each.bytes)} of {name} ({each.category})"
        counted[text] = counted.get(text, 0) + 1
    return ", ".join(f"{count} x {text}" if count > 1 else text for text, count in [*counted.items()][:SHOWN])


def _smaller(lowest: Estimate) -> list[str]:
    """What makes most of the peak smaller."""
    counts = {category: lowest.by_category.get(category, 0) for category in STAYING}
    if 2 * sum(counts.values()) <= lowest.peak_bytes:
        return ["a smaller batch", "a shorter sequence"]
    ways = []
    if 4 * (counts["gradient"] + counts["optimizer"]) >= lowest.peak_bytes:
        ways.append("fewer parameters in training (freeze some)")
    if 4 * counts["optimizer"] >= lowest.peak_bytes:
        ways.append("an optimizer with less state (adamw8bit)")
    if 4 * counts["gradient"] < counts["parameter"]:
        ways.append("frozen weights in fewer bits (quantize-frozen)")
    return ways or ["a smaller model"]


def _listed(ways: Sequence[str]) -> str:
    return f"{', '.join(ways[:-1])}, or {ways[-1]}" if len(ways) > 1 else ways[0]
