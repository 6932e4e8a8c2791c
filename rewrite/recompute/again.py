"""Code for the nodes that one ask runs again: what only they pass on lies in local variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewrite.recompute.course import Ask
    from rewrite.recompute.demand import Run

Again = Callable[["Run", dict[int, Any], tuple[Any, ...]], None]
"""`again(run, values, sources)` runs the nodes on `values`, and what it takes from `sources`, and adds theirs to it."""


def compile_ask(ask: Ask) -> Again:
    """The loads and the actions of an ask as one function."""
    functions = [action.special or action.function for action in ask.actions]
    scope: dict[str, Any] = {f"function_{number}": function for number, function in enumerate(functions)}
    source = "\n    ".join(["def again(run, values, sources):", "module = run.module", *_lines(ask)])
    exec(compile(source, "<recompute>", "exec"), scope)
    made: Again = scope["again"]
    return made


def _lines(ask: Ask) -> Iterator[str]:
    local = set[int]()
    """Places whose value a variable holds, and `values` does not."""

    def name(place: int) -> str:
        return f"value_{place}" if place in local else f"values[{place}]"

    for place, index in ask.loads:
        local.add(place)
        yield f"{name(place)} = run.loaded({place}, sources[{index}])"
    for number, (place, _, reads, gone, special) in enumerate(ask.actions):
        given = ", ".join(map(name, reads))
        if special is None:
            made = f"function_{number}(module, {given})"
        else:
            seed = "None" if special.seed is None else f"sources[{special.seed}]"
            made = f"run.special({place}, function_{number}, [{given}], {seed})"
        local.add(place)
        yield f"{name(place)} = {made}"
        for each in gone:
            yield f"del {name(each)}"
            local.discard(each)
    for place in sorted(local):
        yield f"values[{place}] = {name(place)}"
