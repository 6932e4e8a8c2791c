"""Compute feed-forward parts in chunks of positions, each computed again by itself in the backward.

The wide value inside a feed-forward part, and what activations make of it, is then alive for one chunk at a time, in
the forward and in the backward. Chunks alone would save nothing in training: autograd would hold those of every chunk.
Where a span may be cut is proved on the graph: every operator in it gives for a row what depends on that row alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from passes.nodes import path_in
from passes.selection import patterns_of
from rewrite import Change, Numerics, Pass, PassError, PassResult, Refusal, SelectorError, matches

if TYPE_CHECKING:
    from passes.feed_forwards import FeedForward
    from rewrite import Program, Region

AROUND = 4
"""Times the entry's bytes: what attention of the same width holds in its projections and its result."""
FEWEST_ROWS = 64
"""A chunk of fewer positions costs more time in its products than it saves bytes."""
NOTHING = "no part of the model makes each position wide and narrow again by itself"


@dataclass(frozen=True)
class ChunkFFN(Pass):
    """Compute feed-forward parts chunk by chunk, without ever holding their wide inside."""

    chunks: int | None = None
    """How many; None for as few as bring a chunk's inside down to what the parts around hold."""
    dim: int = 1
    """A dimension along which every operator must be independent: 1 is the sequence. What is proved holds for all but
    the last, so the rows of all positions are cut as they lie in memory."""
    select: tuple[str, ...] | str | None = None
    """Module path globs (`**.mlp`, `encoder.layer.0`): cut only what lies in these modules."""

    name: ClassVar[str] = "chunk-ffn"
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED

    def __post_init__(self) -> None:
        if self.chunks is not None and (type(self.chunks) is not int or self.chunks < 1):
            cause = "chunks is a whole number from 1"
            raise PassError(f"chunk-ffn{{chunks={self.chunks}}}", cause, "leave it out to have it chosen")
        if type(self.dim) is not int or self.dim < 0:
            raise PassError(f"chunk-ffn{{dim={self.dim}}}", "dim is a whole number from 0", "use 1 for the sequence")
        patterns_of(self.name, self.select)

    def apply(self, program: Program) -> PassResult:
        """Replace each span by one node; says where one operator is in the way, and where nothing is saved."""
        from passes.feed_forwards import find_feed_forwards

        changes: list[Change] = []
        refusals: list[Refusal] = []
        matched: set[str] = set()
        saved: list[int] = []
        for region in program.regions:
            found = {last.name: self._fit(span) for last, span in find_feed_forwards(region)}
            for names, instances in self._groups(region, list(found), matched):
                refusals += [each for name, each in found.items() if name in names and isinstance(each, Refusal)]
                spans = {name for name in names if not isinstance(found[name], Refusal)}
                if spans:
                    program, part = program.split(program.left_of(region), instances)
                    again = [each for last, each in find_feed_forwards(part) if last.name in spans]
                    for each in again:
                        if not isinstance(each, Refusal):
                            saved.append(len(instances) * (each.inside_bytes - self._after_bytes(each)))
                            changes.append(self._replace(each))
        self._check_selected(program, matched)
        if program.metadata.get("first", True):
            refusals += [*_unseen(program), *_of_config(program, sum(saved))]
            if not changes and not refusals:
                refusals.append(Refusal("", NOTHING))
        return PassResult(program, bool(changes), tuple(changes), tuple(refusals))

    def offers(self, program: Program) -> Sequence[Pass]:
        """This pass with half as many chunks as fit, as many, and twice as many."""
        from passes.feed_forwards import find_feed_forwards

        spans = [self._fit(span) for region in program.regions for _, span in find_feed_forwards(region)]
        most = max((fitting_chunks(span) for span in spans if not isinstance(span, Refusal)), default=0)
        return [replace(self, chunks=count) for count in sorted({max(2, most // 2), most, 2 * most})] if most else []

    def _fit(self, found: FeedForward | Refusal) -> FeedForward | Refusal:
        """The span, unless cutting it saves nothing."""
        if isinstance(found, Refusal):
            return found
        rank = found.entry.meta["val"].dim()
        if self.dim >= rank - 1 and rank > 2:
            reason = (
                f"dimension {self.dim} is not one of positions: a row here is what stands along dimension {rank - 1}"
            )
            return Refusal(found.path, reason, str(found.last.meta.get("source", "")))
        chunks, after = self.chunks or fitting_chunks(found), self._after_bytes(found)
        if after < found.inside_bytes:
            return found
        reason = (
            f"the inside of the span takes {found.inside_bytes:,} bytes as it is; in {chunks} chunks its entry and one "
            f"chunk would take {after:,}, which saves nothing"
        )
        return Refusal(found.path, reason, str(found.last.meta.get("source", "")))

    def _after_bytes(self, span: FeedForward) -> int:
        """What the span's entry and the inside of one chunk take."""
        return span.entry_bytes + math.ceil(span.inside_bytes / (self.chunks or fitting_chunks(span)))

    def _groups(self, region: Region, names: list[str], matched: set[str]) -> list[tuple[set[str], tuple[str, ...]]]:
        """Instances of a region, by the products at whose spans `select` points in them."""
        if self.select is None:
            return [(set(names), region.instances)]
        patterns = patterns_of(self.name, self.select)
        ends = [node for node in region.nodes() if node.name in names]
        groups: dict[tuple[str, ...], list[str]] = {}
        for instance in region.instances:
            chosen = []
            for node in ends:
                hits = {pattern for pattern in patterns if _selects(pattern, path_in(node, region, instance))}
                matched |= hits
                chosen += [node.name] if hits else []
            groups.setdefault(tuple(chosen), []).append(instance)
        return [(set(chosen), tuple(instances)) for chosen, instances in groups.items() if chosen]

    def _check_selected(self, program: Program, matched: set[str]) -> None:
        missing = [pattern for pattern in patterns_of(self.name, self.select) if pattern not in matched]
        if missing and program.metadata.get("first", True):
            raise SelectorError(
                f"chunk-ffn{{select={missing[0]}}}",
                "it matches no module that holds, or ends, a part that makes each position wide and narrow again",
                "give a path as named_modules() shows it, with * for one component and ** for any number",
            )

    def _replace(self, span: FeedForward) -> Change:
        from passes.feed_forwards import replace_span

        chunks = self.chunks or fitting_chunks(span)
        made = replace_span(span, chunks)
        names = (made, *(node.name for node in (*span.inside, span.last)))
        summary = f"feed-forward in {chunks} chunks, each again in the backward"
        return Change(span.path, summary, span.region.instances, names)


def _unseen(program: Program) -> list[Refusal]:
    """Modules whose own forward runs: whether positions are apart there cannot be proved."""
    causes = {entry.reason: entry for entry in reversed(program.opaque)}
    return [
        Refusal(
            entry.path, f"it has no graph ({entry.reason}), so a feed-forward part in it cannot be cut", entry.source
        )
        for entry in reversed(causes.values())
    ]


def _of_config(program: Program, saved: int) -> list[Refusal]:
    """What transformers' own chunking of feed-forward parts does in training."""
    root = next((region for region in program.regions if not region.path), None)
    config = getattr(root.captured.module, "config", None) if root else None
    size = getattr(config, "chunk_size_feed_forward", 0)
    if not size:
        return []
    reason = (
        f"chunk_size_feed_forward={size} in the config saves 0 bytes in training, as autograd holds what every chunk "
        f"makes; computing each chunk again, as the changes of this pass do, saves {saved:,}"
    )
    return [Refusal("", reason)]


def _selects(pattern: str, path: str) -> bool:
    """Whether a pattern names a module or one around it."""
    parts = path.split(".")
    return any(matches(pattern, ".".join(parts[:length])) for length in range(1, len(parts) + 1))


def fitting_chunks(span: FeedForward) -> int:
    """The fewest chunks, a power of two, whose values and gradients take no more than the parts around hold."""
    sizes = (int(getattr(getattr(size, "node", None), "hint", size)) for size in span.entry.meta["val"].shape[:-1])
    rows = math.prod(sizes)
    chunks = 2
    while 2 * span.inside_bytes > AROUND * span.entry_bytes * chunks and 2 * FEWEST_ROWS * chunks <= rows:
        chunks *= 2
    return chunks
