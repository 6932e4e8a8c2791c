"""What a measured training step tells: plain records, without torch, that become JSON as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from rewrite.report.sizes import size_text

CATEGORIES = ("parameter", "buffer", "input", "gradient", "saved", "temporary", "optimizer")
"""What a byte is held for. `saved`: made in the forward and alive when it ends."""

PHASES = ("forward", "backward", "optimizer")


class Held(NamedTuple):
    """One storage that is alive at the peak."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    module_path: str
    node: str
    """Name of the graph node that made it; the operator's name where no generated code ran."""


class SavedAt(NamedTuple):
    """What one place keeps for the backward, summed over the storages of one shape and dtype."""

    module_path: str
    node: str
    region: str
    """Path of the region whose generated code ran; "" where none did."""
    bytes: int
    shape: tuple[int, ...]
    dtype: str


class Work(NamedTuple):
    """Operators that cost the same: floating point operations and bytes read and written, each call."""

    flops: int
    moved_bytes: int
    half: bool
    """Whether the result is in a 16-bit type."""
    fused: bool
    """Whether it is attention in one kernel."""
    calls: int


@dataclass(frozen=True)
class Peak:
    """The worst moment of a step."""

    bytes: int
    phase: str
    module_path: str
    region: str
    node: str
    largest: tuple[Held, ...] = field(default=(), repr=False)
    """The largest storages alive, in order."""


@dataclass(frozen=True)
class Flops:
    """Floating point operations of a step. What the backward computes again counts in the backward."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True)
class Estimate:
    """The memory and work of one training step, in bytes and floating point operations."""

    peak_bytes: int
    """Everything alive at the worst moment: parameters, buffers, inputs, gradients, activations, temporaries, and
    optimizer state when an optimizer is named."""
    saved_bytes: int
    """Storages made in the forward and alive when it ends, the loss itself and the inputs excluded."""
    by_category: Mapping[str, int]
    """Bytes at the peak, for each of `CATEGORIES`."""
    peak: Peak
    phases: Mapping[str, int]
    """Highest bytes within each phase that ran."""
    curve: tuple[tuple[str, int], ...] = field(repr=False)
    """(phase, bytes) along the step: the highest of each of at most a few hundred spans."""
    saved: tuple[SavedAt, ...] = field(repr=False)
    flops: Flops
    moved_bytes: int
    work: tuple[Work, ...] = field(default=(), repr=False)
    device: str = "cpu"
    optimizer: str | None = None
    loss: str = ""
    """What the backward started from."""
    assumptions: tuple[str, ...] = ()
    """Sentences: where a value was not known and what was taken instead."""
    not_counted: tuple[str, ...] = ()
    """Sentences: what else takes memory on such a device."""
    forward_calls: Mapping[str, int] = field(default_factory=dict, repr=False)
    """How often each module's forward ran in the whole step, by module path (recompute included)."""

    def __str__(self) -> str:
        """The peak and where it is, and what is saved, in one line; `as_dict` has the rest."""
        where = ", ".join(part for part in (self.peak.module_path, self.peak.node) if part)
        at = f"{self.peak.phase}, {where}" if where else self.peak.phase
        sizes = f"peak {size_text(self.peak_bytes)} in {at}; saved {size_text(self.saved_bytes)}"
        return f"{sizes} (device {self.device}, optimizer {self.optimizer or 'none'})"

    def seconds(self, profile: str) -> float:
        """Time of the step's operators on a named device at its peak rates (`rates.PEAK_RATES`); raises KeyError.

        Each operator takes the longer of its arithmetic and its traffic. A lower bound, meant for ratios.
        """
        from rewrite.memory.rates import PEAK_RATES

        rates = PEAK_RATES[profile]
        return sum(
            each.calls
            * max(each.flops / (rates.half_flops if each.half else rates.flops), each.moved_bytes / rates.bytes)
            for each in self.work
        )

    def as_dict(self) -> dict[str, Any]:
        """The record as plain dicts, lists, strings and numbers."""
        return asdict(self)
