"""The passes there are: those of this project and of anyone else, by name, through the entry point group."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

from rewrite.contract import Numerics, Pass
from rewrite.errors import PassError, SpecError
from rewrite.options import Option, documented_options

GROUP = "rewrite.passes"
"""Entry point group: the name is the pass's, the value its class, as `my_package.my_pass:MyPass`."""


@dataclass(frozen=True)
class Description:
    """What a reader of `rewrite passes` is told."""

    name: str
    distribution: str
    """The distribution that ships the pass."""
    summary: str = ""
    """The first sentence of the docstring."""
    doc: str = ""
    numerics: Numerics | None = None
    options: tuple[Option, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    """Rows of text, the header first: what an option's values stand for."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What the options given come to."""
    fault: str = ""
    """Why the pass cannot be loaded; "" when it can."""


def names() -> tuple[str, ...]:
    """The names of every pass installed, sorted; nothing is imported."""
    return tuple(sorted({point.name for point in _entry_points()}))


def load(name: str) -> type[Pass]:
    """The class of the pass called `name`.

    Raises `SpecError` when there is none, and `PassError`, which names the distribution, when it cannot be loaded or
    is not a pass.
    """
    point = _entry_point(name)
    subject = f"pass {name!r} of distribution {_distribution(point)}"
    try:
        cls = point.load()
    except Exception as fault:  # a third party's import may fail in any way
        cause = f"{point.value} cannot be imported: {type(fault).__name__}: {fault}"
        raise PassError(subject, cause, f"repair or uninstall {_distribution(point)}") from fault
    unfit = _why_not_a_pass(cls, name)
    if unfit:
        raise PassError(subject, f"{point.value} {unfit}", f"repair or uninstall {_distribution(point)}")
    found: type[Pass] = cls
    return found


def describe(name: str) -> Description:
    """What the pass called `name` does and takes; a broken one says so in `fault`.

    Raises `SpecError` when there is none.
    """
    try:
        cls = load(name)
    except PassError as broken:
        return Description(name, _shippers(name), fault=broken.cause)
    doc = inspect.cleandoc(cls.__doc__ or "")
    summary = " ".join(doc.split("\n\n")[0].split())
    shown = tuple(tuple(row) for row in cls.table())
    return Description(name, _shippers(name), summary, doc, cls.numerics, documented_options(cls), shown)


def _entry_points() -> tuple[metadata.EntryPoint, ...]:
    return tuple(metadata.entry_points(group=GROUP))


def _entry_point(name: str) -> metadata.EntryPoint:
    points = {point.value: point for point in _entry_points() if point.name == name}
    if not points:
        raise _unknown(name)
    if len(points) > 1:
        raise PassError(f"pass {name!r}", f"{_shippers(name)} each ship a pass of this name", "keep one of them")
    return next(iter(points.values()))


def _shippers(name: str) -> str:
    return " and ".join(sorted({_distribution(point) for point in _entry_points() if point.name == name}))


def _unknown(name: str) -> SpecError:
    there_are = names()
    close = difflib.get_close_matches(name, there_are, n=1)
    listed = f"there are {', '.join(there_are)}" if there_are else f"no pass is installed (group {GROUP!r} is empty)"
    advice = f"did you mean `{close[0]}`?" if close else "`rewrite passes` describes them"
    return SpecError("pass spec", f"no pass is called {name!r}; {listed}", advice)


def _distribution(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "(unknown)"


def _why_not_a_pass(cls: object, name: str) -> str:
    if not (isinstance(cls, type) and issubclass(cls, Pass)):
        return "is not a subclass of rewrite.Pass"
    if inspect.isabstract(cls):
        return "does not define apply()"
    if not isinstance(getattr(cls, "numerics", None), Numerics):
        return "does not say its `numerics`"
    if getattr(cls, "name", None) != name:
        return f"calls itself {getattr(cls, 'name', None)!r}, not {name!r}"
    params = vars(cls).get("__dataclass_params__")
    if params is None or not params.frozen:
        return "is not decorated with @dataclass(frozen=True)"
    return ""
