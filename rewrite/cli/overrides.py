"""`--set key=value`: overrides of a model's configuration, typed by what they replace. Imports no torch."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from rewrite.errors import InputError

WORDS = {"true": True, "false": False, "null": None, "none": None}


def parse_overrides(settings: Iterable[str]) -> dict[str, Any]:
    """`("num_hidden_layers=4", "tie=false")` as `{"num_hidden_layers": 4, "tie": False}`.

    Raises `InputError` for text without `=` and for a key given twice.
    """
    overrides: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals or not key:
            raise InputError(f"--set {setting}", "is not of the form key=value", "write --set num_hidden_layers=4")
        if key in overrides:
            raise InputError(f"--set {key}", "is given twice", "give each key once")
        overrides[key] = parse_value(text.strip())
    return overrides


def parse_value(text: str) -> Any:
    """A Python or JSON literal, or the text itself where it is neither."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def check_override(subject: str, key: str, value: Any, known: Mapping[str, Any]) -> None:
    """Raise `InputError` unless `key` is `known` and `value` is of the kind of the value it replaces."""
    if key not in known:
        close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known keys: {', '.join(sorted(known)[:8])}, ..."
        raise InputError(f"--set {key}", f"is no setting of {subject}", hint)
    default = known[key]
    if fits(value, default):
        return
    raise InputError(
        f"--set {key}={value}",
        f"{subject} has {kind_text(default)} there ({default!r}), not {kind_text(value)}",
        f"give {kind_text(default)}",
    )


def kind_text(value: Any) -> str:
    """The type of `value` with its article: `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def fits(value: Any, default: Any) -> bool:
    """Whether `value` may stand where `default` stands."""
    if value is None or default is None:
        return True
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float))
    if isinstance(default, (list, tuple)):
        return isinstance(value, (list, tuple))
    if isinstance(default, int):
        return isinstance(value, (int, list, tuple))  # many sizes may be given per layer or per dimension
    return isinstance(value, type(default)) if isinstance(default, (str, dict)) else True
