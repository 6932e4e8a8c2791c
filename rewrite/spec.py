"""Pipelines as text: `checkpoint{policy=sqrt,every=2},chunk-loss`.

A spec is a list of passes; a pass is its name and, in braces, the options that differ from their defaults. Values are
`true`, `false`, `none`, integers, floats, strings (bare, or quoted when they hold anything but letters, digits,
`_ . * ? / + : @ % -` and, not at the beginning, sets such as `[0-5]`) and lists `[a,b]`. Bytes are strings such as
`6GiB`; the pass reads them.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rewrite.errors import SpecError
from rewrite.literals import Bare, UnfitError, fit
from rewrite.options import REQUIRED, Option, annotation_text, options

if TYPE_CHECKING:
    from rewrite.contract import Pass

_WORD = re.compile(r"[^\s,{}\[\]=\"']+")
_VALUE = re.compile(_WORD.pattern + r"(\[[^\s,{}\[\]=\"']+\]|[^\s,{}\[\]=\"'])*")
"""A word, with sets of a glob such as `layer.[0-5]`, which cannot begin it: a value that begins with "[" is a list."""
_SAFE = re.compile(r"[A-Za-z0-9_.*?/+:@%-]+(\[[A-Za-z0-9_.!-]+\]|[A-Za-z0-9_.*?/+:@%-])*")
_SINGLE_QUOTED = re.compile(r"'([^']*)'")
_WIDTH = 76
_GRAMMAR = "write passes as `name{option=value,...}`, separated by commas; `rewrite passes` lists them"


def parse(text: str, lookup: Callable[[str], type[Pass]]) -> tuple[Pass, ...]:
    """The passes a spec names, in order; an empty spec is an empty pipeline.

    `lookup` gives the class of a name, as `rewrite.registry.load` does. Raises `SpecError`, which points at the place:
    malformed text, a name or option that does not exist, or a value of the wrong type.
    """
    reader = _Reader(text)
    if reader.at_end():
        return ()
    passes = [_read_pass(reader, lookup)]
    while not reader.at_end():
        reader.expect(",", 'a comma before the next pass, "{" or the end')
        passes.append(_read_pass(reader, lookup))
    return tuple(passes)


def render(passes: Iterable[Pass]) -> str:
    """The shortest spec that parses back to `passes`.

    Raises `SpecError` for an option whose value no spec can say.
    """
    return ",".join(render_pass(pass_) for pass_ in passes)


def render_pass(pass_: Pass) -> str:
    """The spec of one pass, without the options that equal their defaults."""
    known = options(type(pass_))
    given = [
        render_option(pass_, field.name)
        for field in fields(pass_)
        if field.name in known and not _same(getattr(pass_, field.name), known[field.name].default)
    ]
    return f"{pass_.name}{{{','.join(given)}}}" if given else pass_.name


def render_option(pass_: Pass, option: str) -> str:
    """One option of a pass as the spec says it: `every=2`. Raises `SpecError` as `render` does."""
    return f"{option}={_render_value(pass_.name, option, getattr(pass_, option))}"


class _Reader:
    """A position in the text of a spec."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def skip_space(self) -> int:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1
        return self.position

    def at_end(self) -> bool:
        return self.skip_space() == len(self.text)

    def take(self, mark: str) -> bool:
        if not self.text.startswith(mark, self.skip_space()):
            return False
        self.position += len(mark)
        return True

    def expect(self, mark: str, wanted: str) -> None:
        if not self.take(mark):
            raise self.unexpected(wanted)

    def word(self, wanted: str, pattern: re.Pattern[str] = _WORD) -> str:
        found = pattern.match(self.text, self.skip_space())
        if found is None:
            raise self.unexpected(wanted)
        self.position = found.end()
        return found.group()

    def unexpected(self, wanted: str) -> SpecError:
        found = json.dumps(self.text[self.position], ensure_ascii=False) if not self.at_end() else "the end"
        return self.error(self.position, f"expected {wanted}, found {found}", _GRAMMAR)

    def error(self, position: int, cause: str, next_step: str) -> SpecError:
        start = max(0, min(position - _WIDTH // 2, len(self.text) - _WIDTH))
        shown = "".join(" " if letter.isspace() else letter for letter in self.text[start : start + _WIDTH])
        return SpecError("pass spec", f"{cause}\n    {shown}\n    {' ' * (position - start)}^", next_step)


def _read_pass(reader: _Reader, lookup: Callable[[str], type[Pass]]) -> Pass:
    start = reader.skip_space()
    name = reader.word("the name of a pass")
    try:
        cls = lookup(name)
    except SpecError as unknown:
        raise reader.error(start, unknown.cause, unknown.next_step) from None
    known = options(cls)
    given: dict[str, Any] = {}
    if reader.take("{") and not reader.take("}"):
        _read_option(reader, name, known, given)
        while not reader.take("}"):
            reader.expect(",", '"," or "}" after the option')
            _read_option(reader, name, known, given)
    missing = [option for option, about in known.items() if about.default is REQUIRED and option not in given]
    if missing:
        cause = f"{name} needs a value for {', '.join(missing)}"
        raise reader.error(start, cause, f"write `{name}{{{missing[0]}=...}}`; `rewrite passes {name}` describes it")
    try:
        return cls(**given)
    except (ValueError, TypeError) as fault:
        raise reader.error(start, f"{name} does not take these options: {fault}", _help_for(name)) from fault


def _read_option(reader: _Reader, name: str, known: dict[str, Option], given: dict[str, Any]) -> None:
    start = reader.skip_space()
    key = reader.word(f"an option of {name}")
    if key not in known:
        close = difflib.get_close_matches(key, known, n=1)
        there_are = f"its options are {', '.join(known)}" if known else "it has no options"
        advice = f"did you mean `{close[0]}`?" if close else _help_for(name)
        raise reader.error(start, f"{name} has no option {key!r}; {there_are}", advice)
    if key in given:
        raise reader.error(start, f"{key} is given twice", "keep one of the two")
    reader.expect("=", f'"=" and a value after {key}')
    at = reader.skip_space()
    value = _read_value(reader)
    try:
        given[key] = fit(value, known[key].annotation)
    except UnfitError:
        wanted, written = annotation_text(known[key].annotation), reader.text[at : reader.position]
        close = difflib.get_close_matches(written, wanted.split(" | "), n=1)
        advice = f"did you mean `{key}={close[0]}`?" if close else _help_for(name)
        raise reader.error(at, f"{key} takes {wanted}, not {written}", advice) from None


def _read_value(reader: _Reader) -> Any:
    if reader.take("["):
        return _read_list(reader)
    at = reader.skip_space()
    if reader.text.startswith('"', at):
        try:
            value, reader.position = json.JSONDecoder(strict=False).raw_decode(reader.text, at)
        except json.JSONDecodeError as fault:
            raise reader.error(fault.pos, f"the quoted string is broken: {fault.msg}", 'close it with "') from None
        return value
    single = _SINGLE_QUOTED.match(reader.text, at)
    if single is not None:
        reader.position = single.end()
        return single.group(1)
    return Bare(reader.word("a value", _VALUE))


def _read_list(reader: _Reader) -> tuple[Any, ...]:
    if reader.take("]"):
        return ()
    items = [_read_value(reader)]
    while not reader.take("]"):
        reader.expect(",", '"," or "]" after the list\'s value')
        items.append(_read_value(reader))
    return tuple(items)


def _render_value(name: str, option: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        bare = _SAFE.fullmatch(value) is not None and Bare(value).literal() == value
        return value if bare else json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"[{','.join(_render_value(name, option, item) for item in value)}]"
    cause = f"{option} is a {type(value).__name__}, which a spec cannot say"
    raise SpecError(f"pass {name!r}", cause, "pass developer: make it a bool, number, string, none or tuple of these")


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def _help_for(name: str) -> str:
    return f"`rewrite passes {name}` describes its options"
