"""The options of a pass: its dataclass fields, as the command line sees them."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from dataclasses import MISSING, Field, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewrite.contract import Pass

REQUIRED = MISSING
"""`Option.default` of an option that has none."""


@dataclass(frozen=True)
class Option:
    """One option of a pass."""

    name: str
    annotation: Any
    """The field's type, resolved; `Any` when a name in it exists for type checkers only."""
    default: Any
    """The value when it is not given, or `REQUIRED`."""
    doc: str = ""
    """The docstring under the field."""


def options(cls: type[Pass]) -> dict[str, Option]:
    """The options of a pass class by name, in field order, without their docstrings."""
    hints = _hints(cls)
    return {
        field.name: Option(field.name, hints.get(field.name, Any), _default(field))
        for field in fields(cls)
        if field.init
    }


def documented_options(cls: type[Pass]) -> tuple[Option, ...]:
    """The options of a pass class with their docstrings, read from the class's source."""
    docs = _field_docs(cls)
    return tuple(
        Option(option.name, option.annotation, option.default, docs.get(option.name, ""))
        for option in options(cls).values()
    )


def annotation_text(annotation: Any) -> str:
    """A type as a reader of the command line says it: `int`, `blocks | sqrt`, `list of str`, `none`."""
    if annotation is Any:
        return "any value"
    if annotation is None or annotation is type(None):
        return "none"
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join("none" if choice is None else str(choice) for choice in args)
    if is_union(annotation):
        return " | ".join(annotation_text(arg) for arg in args)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return f"list of {annotation_text(args[0])}"
    if origin is tuple:
        return f"[{', '.join(annotation_text(arg) for arg in args)}]"
    if annotation is tuple:
        return "list"
    return getattr(annotation, "__name__", str(annotation))


def is_union(annotation: Any) -> bool:
    """Whether a type is `A | B`, `Union[A, B]` or `Optional[A]`."""
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def _hints(cls: type) -> dict[str, Any]:
    """The resolved field types; none when a name among them exists for type checkers only."""
    try:
        return typing.get_type_hints(cls)
    except NameError:
        return {}


def _field_docs(cls: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):
            continue
        (body,) = ast.parse(source).body
        if isinstance(body, ast.ClassDef):
            found |= _docs_in(body)
    return found


def _docs_in(body: ast.ClassDef) -> dict[str, str]:
    found: dict[str, str] = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if not isinstance(following, ast.Expr) or not isinstance(following.value, ast.Constant):
            continue
        if isinstance(following.value.value, str):
            found[statement.target.id] = inspect.cleandoc(following.value.value)
    return found
