"""The levels of mixed precision, as data. The columns are those of apex amp's `opt_level` table."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from rewrite import PassError

DYNAMIC = "dynamic"


@dataclass(frozen=True)
class Level:
    """One row of the table."""

    cast_model_type: str | None
    """What operators that no list speaks of compute in: `half`, `fp32`, or None for what is around them."""
    patch_torch_functions: bool
    """Casts are put in the graph operator by operator, by the lists; apex patched functions of torch for it."""
    keep_batchnorm_fp32: bool | None
    """Norms, and every other operator of the deny list, compute in fp32; None: as the lists say."""
    master_weights: bool | None
    """Parameters stay fp32 and are cast for the computation; False: they become half themselves."""
    loss_scale: float | str
    """What `rewrite.loss_scaler` multiplies losses by: a number, or "dynamic"."""


LEVELS = {
    "O0": Level("fp32", False, None, False, 1.0),
    "O1": Level(None, True, None, None, DYNAMIC),
    "O2": Level("half", False, True, True, DYNAMIC),
    "O3": Level("half", False, False, False, 1.0),
}
"""apex amp, apex/amp/frontend.py as of 2025-05, with `half` for the dtype chosen."""


def chosen_level(name: str, dtype: str, overrides: dict[str, Any]) -> Level:
    """The row of a level, with the columns that are not None in `overrides` in place of its own.

    A dynamic scale becomes 1.0 with bf16, whose range is that of fp32, unless it is asked for. Raises PassError.
    """
    if name not in LEVELS:
        hint = " (the letter O, not a zero)" if name.startswith("0") else ""
        raise PassError(
            f"mixed-precision{{level={name}}}", f"there is no such level{hint}", f"choose one of {_names()}"
        )
    level = LEVELS[name]
    if dtype == "bf16" and level.loss_scale == DYNAMIC:
        level = replace(level, loss_scale=1.0)
    return replace(level, **{column: value for column, value in overrides.items() if value is not None})


def table(chosen: dict[str, Level] | None = None) -> list[tuple[str, ...]]:
    """Header and rows as text, one row a level."""
    columns = [each.name for each in fields(Level)]
    rows = [(name, *(str(getattr(level, column)) for column in columns)) for name, level in (chosen or LEVELS).items()]
    return [("level", *columns), *rows]


def _names() -> str:
    return ", ".join(LEVELS)
