"""Copy the gradient of each early part of a concatenation, so that the joint gradient can go.

The gradient of a concatenation is one tensor, and its parts are handed views of it. Where one part was made long before
the other, as the skip of a UNet was, its view waits until the backward reaches its maker, and keeps the whole of the
joint gradient alive meanwhile. A copy of the part alone takes less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rewrite import Change, Numerics, Pass, PassResult, Refusal

if TYPE_CHECKING:
    from passes.concatenations import Concatenation
    from rewrite import Program

NOTHING = "no concatenation in the model has a part whose gradient waits while that of a later one is used"


@dataclass(frozen=True)
class SplitGradients(Pass):
    """Let go of the joint gradient of a concatenation while an early part waits."""

    name: ClassVar[str] = "split-gradients"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def apply(self, program: Program) -> PassResult:
        """Put an identity on each part that waits; its backward copies the part's gradient."""
        from passes.concatenations import find_concatenations

        if not program.metadata.get("grad", True):
            return PassResult(program, modified=False)
        changes: list[Change] = []
        refusals: list[Refusal] = []
        for found in list(find_concatenations(program)):
            if isinstance(found, Refusal):
                refusals.append(found)
            else:
                changes.append(_split(found))
        if program.metadata.get("first", True) and not changes and not refusals and not _is_split(program):
            refusals.append(Refusal("", NOTHING))
        return PassResult(program, bool(changes), tuple(changes), tuple(refusals))

    def offers(self, program: Program) -> Sequence[Pass]:
        """This pass, where a part waits."""
        from passes.concatenations import find_concatenations

        return (self,) if any(not isinstance(found, Refusal) for found in find_concatenations(program)) else ()


def _split(found: Concatenation) -> Change:
    from passes.concatenations import split_gradients

    count = f"{len(found.waiting)} of {len(found.parts)} parts"
    freed = f"{found.freed_bytes:,} bytes of the joint gradient go early"
    summary = f"gradients of {count} of {found.node.name} are copies, so that {freed}"
    return Change(found.path, summary, found.region.instances, (*split_gradients(found), found.node.name))


def _is_split(program: Program) -> bool:
    from passes.own_gradient import own_gradient

    return any(node.target is own_gradient for region in program.regions for node in region.nodes())
