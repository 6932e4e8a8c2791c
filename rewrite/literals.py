"""Values in a pass spec, fitted to the type of the option they are for."""

from __future__ import annotations

import re
import typing
from dataclasses import dataclass
from typing import Any

from rewrite.options import is_union

_INTEGER = re.compile(r"[+-]?[0-9]{1,1000}")
_FLOAT = re.compile(r"[+-]?(([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?|inf|nan)")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "none": None}


class UnfitError(Exception):
    """A value is not of the wanted type; the reader of the spec makes the message."""


@dataclass(frozen=True)
class Bare:
    """A value written without quotes: its type depends on what the option takes."""

    text: str

    def literal(self) -> Any:
        """What the text says by itself: a bool, None, an int, a float, or else the text."""
        if self.text in _WORDS:
            return _WORDS[self.text]
        if _INTEGER.fullmatch(self.text):
            return int(self.text)
        if _FLOAT.fullmatch(self.text):
            return float(self.text)
        return self.text


def fit(value: Any, annotation: Any) -> Any:
    """`value` (a `Bare`, a str, or a tuple of these) as `annotation` wants it. Raises `UnfitError`."""
    if annotation is Any:
        return _plain(value)
    if is_union(annotation):
        return _fit_any(value, typing.get_args(annotation))
    if typing.get_origin(annotation) is typing.Literal:
        return _fit_choice(value, typing.get_args(annotation))
    if annotation is tuple or typing.get_origin(annotation) is tuple:
        return _fit_list(value, typing.get_args(annotation))
    if annotation is str and isinstance(value, Bare):
        return value.text
    return _fit_scalar(_plain(value), annotation)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value.literal() if isinstance(value, Bare) else value


def _fit_any(value: Any, choices: tuple[Any, ...]) -> Any:
    """The first choice that takes the value as it stands, then the first that takes it at all."""
    fitted = []
    for choice in choices:
        try:
            fitted.append(fit(value, choice))
        except UnfitError:
            continue
    if not fitted:
        raise UnfitError
    plain = _plain(value)
    return next((found for found in fitted if type(found) is type(plain) and found == plain), fitted[0])


def _fit_choice(value: Any, choices: tuple[Any, ...]) -> Any:
    plain = _plain(value)
    for choice in choices:
        if type(choice) is type(plain) and choice == plain:
            return choice
        if isinstance(value, Bare) and choice == value.text:
            return choice
    raise UnfitError


def _fit_list(value: Any, items: tuple[Any, ...]) -> tuple[Any, ...]:
    """A tuple; a value without brackets is a list of one."""
    if not isinstance(value, tuple):
        value = (value,)
    if not items:
        return tuple(_plain(item) for item in value)
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(fit(item, items[0]) for item in value)
    if len(items) != len(value):
        raise UnfitError
    return tuple(fit(item, wanted) for item, wanted in zip(value, items, strict=True))


def _fit_scalar(plain: Any, annotation: Any) -> Any:
    if annotation is None or annotation is type(None):
        if plain is None:
            return None
        raise UnfitError
    if annotation is float and type(plain) is int:
        return float(plain)
    if isinstance(annotation, type) and type(plain) is annotation:
        return plain
    raise UnfitError
