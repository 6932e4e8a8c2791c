"""Compute head and cross-entropy together, in chunks of rows, so that the full logits never exist.

With a large vocabulary the logits, their log-softmax and its gradient are often the peak of a step. Gradients are
computed where the logits of a chunk are at hand, so nothing is computed twice; a head that is more than one linear map
(LoRA, quantized) has each chunk computed again in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from rewrite import Numerics, Pass, PassError, PassResult, Refusal

if TYPE_CHECKING:
    from passes.heads import Head
    from rewrite import Program

LOGITS = ("auto", "keep", "drop")
FEWEST_ROWS = 64
"""A chunk of fewer rows costs more time in its products than it saves bytes."""
NO_LOSS = (
    "no graph of the model computes a cross-entropy; have the model compute its loss (give it labels), or compute the "
    "loss in a module around it and optimize that"
)


@dataclass(frozen=True)
class ChunkLoss(Pass):
    """Compute the language model head and its loss in chunks, without ever holding the full logits."""

    chunks: int | None = None
    """How many; None for as few as bring a chunk's logits down to the bytes the loss must hold anyway."""
    logits: str = "auto"
    """When the model returns the logits: `auto` computes them when they are read, `keep` as before, `drop` never."""

    name: ClassVar[str] = "chunk-loss"
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED

    def __post_init__(self) -> None:
        if self.chunks is not None and (type(self.chunks) is not int or self.chunks < 1):
            cause = "chunks is a whole number from 1"
            raise PassError(f"chunk-loss{{chunks={self.chunks}}}", cause, "leave it out to have it chosen")
        if self.logits not in LOGITS:
            subject = f"chunk-loss{{logits={self.logits}}}"
            raise PassError(subject, "there is no such choice", f"choose one of {', '.join(LOGITS)}")

    def apply(self, program: Program) -> PassResult:
        """Replace each head and cross-entropy by one node; refuse where that cannot be, or saves nothing."""
        from passes.heads import find_heads
        from passes.losses import rewrite_head

        changes, refusals, seen = [], [], False
        for region in program.regions:
            for found in find_heads(region):
                seen = True
                reason = found if isinstance(found, Refusal) else self._no_gain(found)
                if isinstance(reason, Refusal):
                    refusals.append(reason)
                elif not isinstance(found, Refusal):
                    changes.append(rewrite_head(found, self.chunks or fitting_chunks(found), self.logits))
        if not seen and program.metadata.get("first", True):
            refusals.append(Refusal("", NO_LOSS))
        return PassResult(program, bool(changes), tuple(changes), tuple(refusals))

    def offers(self, program: Program) -> Sequence[Pass]:
        """This pass with as few chunks as fit, and with twice and four times as many."""
        from passes.heads import find_heads

        heads = [found for region in program.regions for found in find_heads(region) if not isinstance(found, Refusal)]
        fewest = max((fitting_chunks(head) for head in heads if self._no_gain(head) is None), default=0)
        return [replace(self, chunks=fewest * times) for times in (1, 2, 4)] if fewest else []

    def _no_gain(self, head: Head) -> Refusal | None:
        chunks = self.chunks or fitting_chunks(head)
        before, after = full_bytes(head), chunked_bytes(head, chunks)
        if after < before:
            return None
        told = f"the loss holds {before:,} bytes at most as it is, and would hold {after:,} in {chunks} chunks"
        return Refusal(
            head.path, f"{told}; it saves nothing with so few rows or classes", head.loss.meta.get("source", "")
        )


def full_bytes(head: Head) -> int:
    """What logits, log-softmax and its gradient take at once as the model computes them."""
    rows, classes = head.rows, head.classes
    return rows * classes * (2 * head.loss_itemsize + head.logits_itemsize)


def chunked_bytes(head: Head, chunks: int) -> int:
    """What a chunk's logits and log-softmax take, beside the gradient of the hidden states that is held longer."""
    rows, wide = head.rows, max(4, head.loss_itemsize)
    size = math.ceil(rows / chunks)
    return size * head.classes * (wide + head.logits_itemsize) + rows * head.width * head.logits_itemsize


def fitting_chunks(head: Head) -> int:
    """The fewest chunks, a power of two, whose logits take no more than the gradients the loss holds anyway."""
    rows = head.rows
    anyway = rows * head.width + head.classes * head.width
    chunks = 2
    while rows * head.classes * 2 > anyway * chunks and rows > FEWEST_ROWS * chunks * 2:
        chunks *= 2
    return chunks
