"""What a pass is, and what it answers. Imports no torch, so that passes can be listed without it."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rewrite.precision import Precision
from rewrite.spec import render_pass

if TYPE_CHECKING:
    from torch import nn

    from rewrite.program import Program


class Numerics(enum.Enum):
    """How close a pass keeps loss and gradients to the untouched model, under the same seed."""

    EXACT = "exact"
    """Bit-equal."""
    REASSOCIATED = "reassociated"
    """Equal up to the order of summation."""
    REDUCED = "reduced"
    """Computed in lower precision."""


@dataclass(frozen=True)
class Change:
    """One thing a pass did, at one place, for every instance that shares it."""

    path: str
    """Module path of the first instance."""
    summary: str
    """One sentence, without a full stop."""
    instances: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    """Names of the nodes tagged or replaced."""


@dataclass(frozen=True)
class Refusal:
    """One place a pass left alone, and why."""

    path: str
    reason: str
    """Subject, cause and next step."""
    source: str = ""


def _nothing() -> None:
    """Undoes what was not done."""


@dataclass(frozen=True)
class Preparation:
    """What `Pass.prepare` did to the modules of a model."""

    replaced: tuple[str, ...] = ()
    """Paths of the modules in whose place others stand, with parameters of their own."""
    refusals: tuple[Refusal, ...] = ()
    """For `apply` to hand on."""
    undo: Callable[[], None] = _nothing
    """Puts every module back."""


@dataclass(frozen=True)
class PassResult:
    """What `Pass.apply` answers."""

    program: Program
    modified: bool
    """Whether anything in `program` is other than in the program given; the pipeline checks it."""
    changes: tuple[Change, ...] = ()
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class Pass(abc.ABC):
    """A rewrite of a program. Subclasses are frozen dataclasses; their fields are the options of the spec text.

    A pass decides and tags nodes of the program it is given (the pipeline hands it a copy of its own); it never
    changes what the program computes beyond its `numerics`, nor the structure of a region's outputs.
    """

    name: ClassVar[str]
    """Command-line name: the class name in kebab case."""
    numerics: ClassVar[Numerics]

    def prepare(self, model: nn.Module) -> Preparation:
        """Replace modules of `model`, which is then captured as it is; nothing by default.

        `model` is the copy that is to be rewritten, or the user's own with `inplace=True`: what is replaced must be
        undone by what this returns. A module that stands in the place of another has its `reference()`, an ordinary
        module that computes the same, for `verify` to compare with. `apply` finds what was done in the program's
        `metadata["prepared"]`, by the pass's spec text.
        """
        return Preparation()

    @abc.abstractmethod
    def apply(self, program: Program) -> PassResult:
        """Tag `program` and say what was done. Raises `PassError` for options that do not fit the program."""

    def offers(self, program: Program) -> Sequence[Pass]:
        """Passes of this kind that the planner should try on `program`, with options that suit it; cheap to find.

        None by default: a pass then runs only where it is named.
        """
        return ()

    @classmethod
    def table(cls) -> Sequence[tuple[str, ...]]:
        """What an option's values stand for, for `rewrite passes`: rows of text, the header first; none by default."""
        return ()

    def settings(self) -> Mapping[str, str]:
        """What the options given come to, for `rewrite passes NAME{...}`; nothing by default."""
        return {}

    def precision(self) -> Precision | None:
        """The precision this pass has the model compute in; None, by default, for a pass that casts nothing.

        A pass with one runs before all others, wherever it is named: what they cut or recompute has its casts by then.
        The rewritten model then keeps to it, under an autocast of the caller's too.
        """
        return None

    def holds(self, program: Program) -> Collection[str]:
        """Paths of the modules that are to stay in eval mode, whatever `train()` says; none by default.

        Asked before the passes run. The call is captured once more when it changes a module's mode, so what it answers
        must not depend on modes. A module held before, and not named for a program that runs it, is released.
        """
        return ()

    def within(self, budget: str | int, profile: str | None) -> Pass | None:
        """This pass told to choose what to keep so that a step fits `budget`, priced by a device profile's rates.

        None by default: the pass takes no budget. The planner adds the first that does to what it has chosen.
        """
        return None

    def __str__(self) -> str:
        """The spec text that parses back to this pass."""
        return render_pass(self)


def loosest(passes: Sequence[Pass]) -> Numerics:
    """The numerics a pipeline promises: those of its least exact pass."""
    order = list(Numerics)
    return max((each.numerics for each in passes), key=order.index, default=Numerics.EXACT)
