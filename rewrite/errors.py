"""Every error the package raises: one small tree, one shape of message."""

from __future__ import annotations

from typing import ClassVar


class RewriteError(Exception):
    """An expected failure, told in three parts that fit one screen.

    `str(error)` is the subject and the cause on the first line and the next step on the last; the cause may run over
    several lines. Errors pickle, so they cross process borders with every part in place.
    """

    exit_code: ClassVar[int] = 101
    """What the command line exits with: 1 does not fit, 2 bad usage or capture failed, 3 check failed, 101 internal."""

    def __init__(self, subject: str, cause: str, next_step: str) -> None:
        """Say what the error is about, why it happened, and what the reader can do next."""
        super().__init__(subject, cause, next_step)
        self.subject = subject
        self.cause = cause
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.subject}: {self.cause}\nNext: {self.next_step}"


class CaptureError(RewriteError):
    """A model, or a region of it, could not be captured."""

    exit_code = 2


class PassError(RewriteError):
    """A pass cannot be loaded, or its options do not fit the program."""

    exit_code = 2


class PassCrashError(PassError):
    """A pass raised an error of its own; `__cause__` holds it."""

    exit_code = 101


class ContractError(RewriteError):
    """A pass did something other than what it said."""

    exit_code = 101


class SpecError(RewriteError):
    """The text of a pipeline is malformed, or names a pass or an option that does not exist."""

    exit_code = 2


class SelectorError(RewriteError):
    """A selector matches nothing."""

    exit_code = 2


class ModelError(RewriteError):
    """A model could not be found or built."""

    exit_code = 2


class InputError(RewriteError):
    """Example inputs are missing or do not fit the model."""

    exit_code = 2


class BudgetError(RewriteError):
    """No plan fits the bytes that were given."""

    exit_code = 1

    def __init__(self, subject: str, cause: str, next_step: str, lowest_bytes: int = 0) -> None:
        """`lowest_bytes` is the lowest peak that a plan was found for."""
        super().__init__(subject, cause, next_step)
        self.args = (subject, cause, next_step, lowest_bytes)
        self.lowest_bytes = lowest_bytes


class PlanError(RewriteError):
    """A saved plan cannot be used: it is none, or was made for another training step."""

    exit_code = 2


class OptimizerError(RewriteError):
    """An optimizer cannot be made, or cannot take a state."""

    exit_code = 2


class VerifyError(RewriteError):
    """A rewritten model does not compute what the original does."""

    exit_code = 3


class RecomputeError(RewriteError, RuntimeError):
    """A recompute in the backward cannot give what the forward gave, such as after a weight changed in between."""

    exit_code = 3


class DeferredError(RewriteError, RuntimeError):
    """A value that is computed when it is read cannot be had any more, or was dropped."""

    exit_code = 3
