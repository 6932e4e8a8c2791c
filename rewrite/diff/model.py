"""The records of a diff: plain values, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """keep, recompute, add, drop, or the name of a tag that changed."""
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

    @property
    def modified(self) -> bool:
        return any(record.modified for record in self.passes)

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


@dataclass(frozen=True)
class View:
    """A model as captured, with the memory of one training step: what `rewrite show` prints."""

    model: str
    estimate: Estimate
    hunks: tuple[Hunk, ...]
    """Every region that holds nodes, root first; lines carry no change."""
    opaque: tuple[Opaque, ...] = ()
