"""What autograd saved in a forward of a segment, in order: later forwards of the same kind are told by it.

It holds no tensor, and nothing is taken on trust: `rewrite.recompute.followed` looks at each tensor that is saved.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from rewrite.recompute.course import Course, Tokens
from rewrite.recompute.demand import Run
from rewrite.recompute.plan import Place
from rewrite.recompute.tokens import WHOLE, Kept, Saved, Token

KINDS = 8
"""Of how many kinds of calls a segment remembers what is saved."""

KEPT, WEIGHT, VALUE, OWN = range(4)


class Entry(NamedTuple):
    """One tensor that is saved."""

    kind: int
    """KEPT, a WEIGHT, in the memory of a VALUE that is dropped, or the operator's OWN: what becomes of that, the node's
    end tells."""
    saved: Saved = Saved(0, WHOLE, 0, None)
    slot: int = 0
    """Of a value: the number by which it is known while the forward runs."""
    ahead: int = 0
    """How many bytes after the start of the value the tensor starts."""
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


class End(NamedTuple):
    """A node that has run."""

    saved: int
    """How many tensors were saved until then."""
    own: tuple[Entry, ...]
    """What its operator made and saved: in the memory of its VALUE, or its OWN. All of it is dropped."""
    told: tuple[tuple[int, int], ...]
    """Parts of its value to be known, each with its slot."""


class Script(NamedTuple):
    """What one kind of forward saves."""

    entries: tuple[Entry, ...]
    ends: tuple[End, ...]
    tokens: Tokens
    course: Course
    need_grad: dict[Place, bool]
    dropped_state: dict[Place, tuple[int, list[int]]]


def kind_of(inputs: Sequence[Any]) -> Hashable | None:
    """Equal for forwards that save alike; None where tensors have no address to be told by."""
    found: list[Any] = []
    for value in inputs:
        if type(value) is torch.Tensor:
            if value.is_meta:
                return None
            found.append((value.size(), value.stride(), value.requires_grad))
        elif value is None or type(value) in (int, bool):
            found.append((type(value), value))
        else:
            return None
    return tuple(found)


class Learner:
    """Takes notes of one forward."""

    def __init__(self, kind: Hashable) -> None:
        self.kind = kind
        self.addressed = True
        """Whether every value has an address; on some devices none has, and empty ones have none."""
        self.notes: list[tuple[Token | Kept, Entry]] = []
        self.nodes: list[tuple[Place, int, list[Entry]]] = []
        self.own: list[Entry] = []
        """What the node that runs has made and saved."""

    def saved(self, held: Token | Kept, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """`held` is what autograd holds for `tensor`, which lies in `value` if that is to be computed again."""
        if isinstance(held, tuple):
            entry = Entry(WEIGHT if held[0] is tensor else KEPT)
        elif value is None:
            entry = Entry(OWN)
        else:
            entry = self._in(value, tensor, held.saved)
        self.notes.append((held, entry))

    def settled(self, saved: Saved, tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        """A `tensor` that the operator has made is dropped; it lies in `value`, or in none."""
        self.own.append(Entry(OWN, saved) if value is None else self._in(value, tensor, saved))

    def made(self, place: Place, saved: int) -> None:
        """The node at `place` has run, and `saved` tensors were saved until then."""
        self.nodes.append((place, saved, self.own))
        self.own = []

    def learned(self, run: Run, tokens: Tokens, course: Course) -> None:
        """The forward is through: what it saved is known to the plan."""
        if not self.addressed:
            return
        slots: dict[tuple[Place, int], int] = {}
        entries = []
        for held, entry in self.notes:
            if entry.kind == VALUE:
                slot = slots.setdefault((entry.saved.wanted, entry.saved.part), len(slots))
                entry = entry._replace(slot=slot)
            elif entry.kind == OWN and isinstance(held.kept, tuple):  # type: ignore[union-attr]
                entry = Entry(KEPT)  # it was small, or of a value that is kept
            entries.append(entry)
        ends = [End(saved, tuple(own), tuple((part, slot) for (at, part), slot in slots.items() if at == place))
                for place, saved, own in self.nodes]  # fmt: skip
        scripts = run.plan.scripts
        while len(scripts) >= KINDS:
            scripts.pop(next(iter(scripts)), None)
        scripts[self.kind] = Script(
            tuple(entries), tuple(ends), tokens, course, dict(run.need_grad), dict(run.dropped_state)
        )

    def _in(self, value: torch.Tensor, tensor: torch.Tensor, saved: Saved) -> Entry:
        start = value.data_ptr()
        ahead, self.addressed = tensor.data_ptr() - start, self.addressed and start != 0
        return Entry(VALUE, saved, 0, ahead, tensor.size(), tensor.stride(), tensor.dtype)
