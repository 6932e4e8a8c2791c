"""How large the values of a model get, held against what a precision can hold. Plain records, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["", "near", "overflow", "not finite"]


@dataclass(frozen=True)
class ValueRange:
    """One value of a model, or all that one operator of a module gives."""

    path: str
    """Where, as selectors such as `keep_fp32` name it: the module, and the operator called in its forward."""
    operator: str
    """What gives it: `matmul`, `nn.Linear`; `input` or `parameter`."""
    source: str = ""
    """The user's line, as `file.py:12`."""
    largest: float = 0.0
    """The largest finite magnitude, but for what masks are made of."""
    state: State = ""
    """`near` above the share that is asked for, `overflow` where the precision rounds it to infinity, `not finite`
    where it is NaN or infinite before it is rounded."""


@dataclass(frozen=True)
class Ranges:
    """Every value that a forward computed."""

    dtype: str
    """The precision that the values are held against, as torch names it: `float16`."""
    limit: float
    """Its largest number."""
    share: float
    """The part of it from which on a value is near."""
    values: tuple[ValueRange, ...]
    """In the order of the graphs; parameters last."""
    unseen: tuple[str, ...] = ()
    """Modules that run as their author wrote them: only what they give is seen."""

    @property
    def near(self) -> tuple[ValueRange, ...]:
        """What comes near the limit or beyond it, the worst first."""
        found = [each for each in self.values if each.state]
        return tuple(sorted(found, key=lambda each: (each.state != "not finite", -each.largest)))

    def __str__(self) -> str:
        """One line a value that is near."""
        found = [f"{each.path} ({each.operator}): {each.state}, {each.largest:.4g} {each.source}" for each in self.near]
        return "\n".join(found) or f"every value is below {self.share:g} of the largest {self.dtype}, {self.limit:g}"
