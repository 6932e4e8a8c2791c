"""What the installed passes offer for a program, as pipelines to choose from."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

from rewrite import pipeline, registry
from rewrite.contract import Numerics, Pass
from rewrite.errors import PassError, RewriteError
from rewrite.program import Program
from rewrite.text import program_text

MOST_PIPELINES = 64
"""Combinations tried; of more offers than make these, the last of the pass with the most are left out."""
ORDER = (Numerics.EXACT, Numerics.REDUCED, Numerics.REASSOCIATED)
"""In which order passes of different numerics run: casts must be in the graph before what is cut into chunks."""

log = logging.getLogger("rewrite")


def installed() -> tuple[Pass, ...]:
    """Every pass that can be loaded, with its default options, in the order in which they run together."""
    found = [made for name in registry.names() if (made := _default(name)) is not None]
    return in_order(found)


def in_order(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Passes in the order in which they run together."""
    return tuple(sorted(passes, key=lambda each: (ORDER.index(each.numerics), each.name)))


def _default(name: str) -> Pass | None:
    try:
        return registry.load(name)()
    except (TypeError, RewriteError) as fault:  # a required option, or a pass that cannot be loaded
        log.debug("pass %r is not planned with: %s", name, fault)
        return None


def offers(program: Program, passes: Sequence[Pass], loosest: Numerics) -> list[list[Pass]]:
    """What each pass offers whose numerics are no looser than `loosest`."""
    allowed = list(Numerics)[: list(Numerics).index(loosest) + 1]
    return [found for each in passes if each.numerics in allowed and (found := list(each.offers(program)))]


def pipelines(offered: Sequence[Sequence[Pass]]) -> list[tuple[Pass, ...]]:
    """Every choice of at most one offer of each pass, those of the fewest passes first; none at all comes first."""
    kept = [list(each) for each in offered]
    while _count(kept) > MOST_PIPELINES:
        max(kept, key=len).pop()
    choices = itertools.product(*[(None, *each) for each in kept])
    made = [tuple(each for each in choice if each is not None) for choice in choices]
    return sorted(made, key=len)


def _count(offered: Sequence[Sequence[Pass]]) -> int:
    count = 1
    for each in offered:
        count *= len(each) + 1
    return count


def applied(program: Program, choices: Sequence[tuple[Pass, ...]]) -> list[tuple[tuple[Pass, ...], Program]]:
    """The program that each pipeline makes; pipelines that cannot run, or make the same as an earlier one, left out."""
    found: dict[str, tuple[tuple[Pass, ...], Program]] = {}
    for passes in choices:
        try:
            made = pipeline.run(program, passes).program
        except PassError as refused:
            log.debug("%s is not planned with: %s", ",".join(map(str, passes)), refused)
            continue
        found.setdefault(program_text(made), (passes, made))
    return list(found.values())
