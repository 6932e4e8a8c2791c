"""Select modules by path: `encoder.layer.*.attention`, `**.mlp`, `layers.[0-5]`."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence


def matches(pattern: str, path: str) -> bool:
    """Whether `path` is selected, itself or through a module above it.

    `*` and `[...]` stand for one component of a path, as in file names; `**` stands for any number of components.
    """
    parts = path.split(".") if path else []
    return any(_match(pattern.split("."), parts[:length]) for length in range(1, len(parts) + 1))


def _match(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_match(pattern[1:], parts[skip:]) for skip in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _match(pattern[1:], parts[1:])
