"""The records of a diff: plain values, without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rewrite.report.columns import PRINTED_WIDTH, plain
from rewrite.report.diff import diff_lines

if TYPE_CHECKING:
    from rewrite.contract import Change, Refusal
    from rewrite.memory.timeline import Estimate
    from rewrite.program import Opaque


@dataclass(frozen=True)
class NodeLine:
    """One node of a region, or what an opaque module keeps, before and after; bytes are per instance."""

    mark: str
    """`-` no longer kept or no longer there, `+` newly kept, made or recomputed, `~` changed, a blank unchanged."""
    action: str
    """keep, recompute, add, drop, cast, dtype (it gives another dtype), read (of a parameter), rewire, or the name of a
    tag that changed."""
    name: str
    """The node's name in its graph; the operator's name where no graph holds it."""
    label: str
    """Where the node stands in its region and what it calls, as `mlp.gate_proj` or `mlp.mul`."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    before_bytes: int = 0
    """Kept for the backward by this node, per instance, in the untouched model."""
    after_bytes: int = 0
    source: str = ""
    """The user's line, as `file.py:12`."""
    segment: int | None = None
    """The recompute segment the node is in after the rewrite."""
    value_bytes: int = 0
    """Size of the node's value, kept or not."""
    stored_bits: int | None = None
    """Bits that the frozen weight of the layer is stored in by a pass."""
    was_dtype: str = ""
    """The dtype that a cast is given; of another node the one it gave before, where it gives another now."""
    weight: bool = False
    """Whether it casts a weight, again only when that has changed."""


@dataclass(frozen=True)
class Hunk:
    """The lines of one region, for every instance that changes in the same way."""

    path: str
    """Module path of the first instance; "" for the root."""
    instances: tuple[str, ...]
    class_name: str
    lines: tuple[NodeLine, ...]
    before_bytes: int
    """Kept for the backward, over all instances."""
    after_bytes: int
    recomputed_nodes: int = 0
    """How many operations of one instance run again in the backward."""

    @property
    def saved_bytes(self) -> int:
        """Bytes no longer kept for the backward, over all instances."""
        return self.before_bytes - self.after_bytes

    @property
    def changed(self) -> bool:
        return self.saved_bytes != 0 or any(line.mark != " " for line in self.lines)


@dataclass(frozen=True)
class CastCount:
    """Casts from one dtype to another that were put into a model, less those taken out, over all instances."""

    from_dtype: str
    to_dtype: str
    count: int = 0
    """Casts of a forward."""
    bytes: int = 0
    """What they write."""
    weights: int = 0
    """Casts of weights, each made again only when its weight has changed."""
    weight_bytes: int = 0


@dataclass(frozen=True)
class PassRecord:
    """What one pass of the pipeline did and refused."""

    name: str
    spec: str
    """Text that parses back to the pass."""
    numerics: str
    modified: bool
    changes: tuple[Change, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class GraphDiff:
    """A model before and after a pipeline, for one training step on one device."""

    model: str
    passes: tuple[PassRecord, ...]
    before: Estimate
    after: Estimate
    hunks: tuple[Hunk, ...]
    """Those that changed, in the order of the model's modules."""
    opaque: tuple[Opaque, ...] = ()
    unchanged: int = 0
    """How many module instances with a graph of their own stayed as they were."""
    profile: str = ""
    """The device whose peak rates price the time; "" when none was asked for."""

    def __str__(self) -> str:
        """The diff as `rewrite diff` prints it."""
        return plain(diff_lines(self, PRINTED_WIDTH))

    @property
    def modified(self) -> bool:
        return any(record.modified for record in self.passes)

    @property
    def casts(self) -> tuple[CastCount, ...]:
        """Casts by the dtypes they lead from and to."""
        found: dict[tuple[str, str], CastCount] = {}
        for hunk in self.hunks:
            for line in hunk.lines:
                if line.action == "cast":
                    times = len(hunk.instances) if line.mark == "+" else -len(hunk.instances)
                    kind = (line.was_dtype, line.dtype)
                    found[kind] = _counted(found.get(kind, CastCount(*kind)), line, times)
        return tuple(found.values())

    @property
    def peak_delta_bytes(self) -> int:
        """Peak after less peak before: negative when the rewrite saves."""
        return self.after.peak_bytes - self.before.peak_bytes

    @property
    def recompute_flops(self) -> int:
        """Floating point operations a step does on top of the untouched model's."""
        return self.after.flops.total - self.before.flops.total

    @property
    def time_ratio(self) -> float | None:
        """Predicted time of a step after, over before, on `profile`."""
        if not self.profile:
            return None
        before = self.before.seconds(self.profile)
        return self.after.seconds(self.profile) / before if before else None


def _counted(so_far: CastCount, line: NodeLine, times: int) -> CastCount:
    if line.weight:
        written = so_far.weight_bytes + times * line.value_bytes
        return replace(so_far, weights=so_far.weights + times, weight_bytes=written)
    return replace(so_far, count=so_far.count + times, bytes=so_far.bytes + times * line.value_bytes)


@dataclass(frozen=True)
class View:
    """A model as captured, with the memory of one training step: what `rewrite show` prints."""

    model: str
    estimate: Estimate
    hunks: tuple[Hunk, ...]
    """Every region that holds nodes, root first; lines carry no change."""
    opaque: tuple[Opaque, ...] = ()
