"""What a bisection found. Plain records, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rewrite.certificate import farthest
from rewrite.spec import render, render_option

if TYPE_CHECKING:
    from rewrite.certificate import Row
    from rewrite.contract import Pass


@dataclass(frozen=True)
class Bisection:
    """The operators to keep in fp32, as selectors, and how near the outputs are without and with them."""

    selectors: tuple[str, ...]
    """What is to be kept beside what the spec keeps already; empty where the outputs are near enough as they are."""
    passes: tuple[Pass, ...]
    """The passes given, with the selectors among their options."""
    kept: tuple[str, ...]
    """The operators that the selectors select, by path: none of them can be left out."""
    candidates: tuple[str, ...]
    """The operators that the pass would have compute in half precision."""
    before: tuple[Row, ...]
    """Each output, with nothing kept but what the spec says."""
    after: tuple[Row, ...]
    """Each output, with the selectors."""
    trials: int
    """How many rewrites were run."""
    tolerance: float | None
    """Allowed difference over the largest magnitude of an output; None for what rounding in each layer may come to."""
    minimal: bool = True
    """False where `max_trials` ended the search: a smaller set may do."""

    @property
    def needed(self) -> bool:
        """Whether the outputs are too far off with nothing kept."""
        return bool(self.selectors)

    @property
    def keep_fp32(self) -> str:
        """The option ready to paste into the spec, with what it held already; "" where it holds nothing."""
        holder = next(each for each in self.passes if hasattr(each, "keep_fp32"))
        return render_option(holder, "keep_fp32") if holder.keep_fp32 else ""

    @property
    def spec(self) -> str:
        """The whole pipeline as text."""
        return render(self.passes)

    def __str__(self) -> str:
        if not self.needed:
            return f"nothing needs to be kept in fp32: {farthest(self.before)}"
        return f"{self.keep_fp32}  ({len(self.kept)} of {len(self.candidates)} operators, {self.trials} trials)"
