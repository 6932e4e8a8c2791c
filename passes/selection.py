"""The option `select`: globs of module paths."""

from __future__ import annotations

from typing import Any

from rewrite import PassError


def patterns_of(name: str, select: Any) -> tuple[str, ...]:
    """The globs that the option `select` of the pass `name` gives, none for None.

    Raises PassError for what is no text, or tuple of texts, and for an empty one.
    """
    if select is None:
        return ()
    patterns = (select,) if isinstance(select, str) else select
    if not isinstance(patterns, tuple) or not all(isinstance(each, str) for each in patterns):
        cause = f"it takes a text or a tuple of texts, not {select!r}"
        raise PassError(f"{name}{{select=}}", cause, "name module paths, as encoder.layer.[0-5]")
    if not all(patterns) or not patterns:
        raise PassError(f"{name}{{select=}}", "it names no module", "name module paths, or leave `select` out")
    return patterns
