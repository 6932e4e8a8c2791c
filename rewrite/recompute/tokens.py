"""What autograd holds in the place of a tensor that an operator of a segment saves."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from rewrite.recompute import dropout
from rewrite.recompute.plan import Place, Plan
from rewrite.recompute.unchanged import changed

WHOLE = -1
"""Part of a value: all of it. Other parts are positions in a tuple."""

Kept = tuple[torch.Tensor, int, Plan]
"""What autograd holds for a tensor that is kept: it, how often it had been written when it was saved (of what goes
through hooks autograd does not check that), and the plan it was kept by."""


class Cashing(Protocol):
    """The run that a token is of."""

    def cashed(self, token: Token) -> torch.Tensor:
        """The tensor that the token stands for."""


class Saved(NamedTuple):
    """What there is to know of a tensor that is saved and not kept."""

    wanted: Place
    """The value it is a view of; `~place` for what the operator of a node made for itself."""
    part: int
    number: int
    """Which of the tensors saved by its operator it is."""
    geometry: tuple[Any, Any, Any] | None
    """Size, stride and offset, where they are not the value's."""


class Token:
    """What autograd holds for a tensor that an operator of the segment made."""

    __slots__ = ("index", "kept", "run", "saved", "sources")

    def __init__(self, run: Cashing, saved: Saved, kept: Kept | None) -> None:
        self.run = run
        self.saved = saved
        self.kept: Kept | dropout.Mask | None = kept
        """The tensor, or the mask it is made from, unless it is to be computed again."""
        self.index: int
        """Its place among the tokens of the run that are not kept."""
        self.sources: tuple[Any, ...]
        """What it can be had from. Held here, so that it goes with the last token that may need it."""


_UNSETTLED = Saved(0, WHOLE, 0, None)


def unsettled(run: Cashing, kept: Kept) -> Token:
    """A token of which the end of the node tells what it stands for."""
    return Token(run, _UNSETTLED, kept)


def unpack(held: Token | Kept) -> torch.Tensor:
    """The tensor that is held, or that a token stands for."""
    if type(held) is tuple:
        kept = held
    else:
        token: Token = held  # type: ignore[assignment]
        if token.kept is None:
            return token.run.cashed(token)
        if type(token.kept) is dropout.Mask:
            return token.kept.expand()
        kept = token.kept  # type: ignore[assignment]
    tensor, version, plan = kept
    if tensor._version != version:
        raise changed(plan.path, "a tensor that was saved for the backward was changed in place")
    return tensor
