"""A budget as a user gives it, made into what chooses passes while a model is rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rewrite.contract import Numerics, Pass
from rewrite.errors import InputError
from rewrite.example import Example
from rewrite.plan.joint import Joint
from rewrite.plan.search import rates_of
from rewrite.program import Program
from rewrite.report.sizes import parse_bytes


@dataclass(frozen=True)
class Chooser:
    """Chooses passes for the first training step that a model is captured for."""

    budget: str | int
    allow: Numerics = Numerics.REASSOCIATED
    profile: str | None = None
    given: tuple[str, ...] = ()
    """Names of passes that run before, which are not offered again."""

    def __call__(self, program: Program) -> tuple[Pass, ...]:
        """The passes for a program whose metadata hold the call; raises BudgetError when no choice fits."""
        return self.joint(program).plan(self.budget).passes

    def joint(self, program: Program, only: int | None = None) -> Joint:
        """What there is to choose from; with `only`, of the offers at that place in a pass's list."""
        example: Example = program.metadata["example"]
        return Joint(program, example, profile=self.profile, allow=self.allow, given=self.given, only=only)


def chooser(
    budget: str | int, given: Sequence[Pass] = (), *, profile: str | None = None, allow: str = "reassociated"
) -> Chooser:
    """A chooser for a budget, told as a user tells it; raises InputError for what makes no sense."""
    if not isinstance(budget, (int, str)):
        raise InputError(f"budget {budget!r}", "is no number of bytes", "write 8GiB, 512MiB or a plain number")
    bytes_given = budget if isinstance(budget, int) else parse_bytes(budget)
    if isinstance(budget, bool) or bytes_given < 1:
        raise InputError(f"budget {budget!r}", "is no number of bytes", "write 8GiB, 512MiB or a plain number")
    rates_of(profile, "cpu")
    for each in given:
        if each.within(budget, profile) is not None:
            cause = f"a budget chooses what {each.name} keeps, and {each} is given beside it"
            raise InputError(f"budget {budget}", cause, f"leave {each.name} out, or the budget")
    levels = [each.value for each in Numerics]
    if allow not in levels:
        raise InputError(f"allow {allow!r}", "there are no such numerics", f"choose one of {', '.join(levels)}")
    return Chooser(budget, Numerics(allow), profile, tuple(each.name for each in given))
