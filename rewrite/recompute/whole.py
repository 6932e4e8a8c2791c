"""Recompute a segment whole: hold its inputs, and run it once more when the backward first asks for a value of it.

The way for segments that call blocks, open spans of no_grad or autocast, or change their inputs: torch's non-reentrant
checkpoint does the work, with what it leaves open closed. Buffers are written once, inputs changed in place are kept as
they were, and a weight or input changed between forward and backward raises instead of giving wrong gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from rewrite.recompute import nesting
from rewrite.recompute.buffers import buffers_as
from rewrite.recompute.layers import Layers, Owners
from rewrite.recompute.settings import Modes, as_set
from rewrite.recompute.unchanged import Weights, changed


@dataclass(frozen=True)
class Recomputed:
    """A part of a graph as a function, and what recomputing it needs to know."""

    path: str
    """Module path of the region, for messages."""
    forward: Callable[..., tuple[Any, ...]]
    """`forward(module, *inputs)` runs the nodes of the segment; returns its results, then the values it keeps."""
    again: Callable[..., tuple[Any, ...]]
    """`again(module, *inputs, *kept)` runs them without those whose value is kept; returns the results."""
    results: int
    owners: Owners
    """The modules whose parameters the segment may read."""
    written_buffers: tuple[str, ...]
    mutated_inputs: tuple[int, ...]
    """Positions of inputs that the segment changes in place."""
    whole: bool
    """Whether the recompute must run to its end: some kernels (rrelu) fill what they save after saving it."""

    def __call__(self, module: nn.Module, *inputs: Any) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return self.forward(module, *inputs)[: self.results]
        return recompute(self, module, inputs)


def recompute(segment: Recomputed, module: nn.Module, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run `segment`, hold its inputs, and compute its values again when the backward asks for them."""
    run = _Run(segment, module, inputs)
    held = [None if place in run.originals else value for place, value in enumerate(inputs)]
    with set_checkpoint_early_stop(not segment.whole):
        result: tuple[Any, ...] = checkpoint(run, *held, use_reentrant=False, preserve_rng_state=True)
    run.remember_versions(inputs)
    return result


class _Run:
    """One pass through a segment: the first call is the forward, every later one a recompute."""

    def __init__(self, segment: Recomputed, module: nn.Module, inputs: Sequence[Any]) -> None:
        self.segment = segment
        self.module = module
        self.changing = {place: inputs[place] for place in segment.mutated_inputs}
        """Inputs that the forward changes in place; empty once it is through."""
        self.need_grad = {place: value.requires_grad for place, value in self.changing.items()}
        self.first = True
        self.choices: list[Any] = []
        """The code that the regions called inside have run."""
        self.kept: list[Any] = []
        with torch.no_grad():
            self.originals = {place: inputs[place].detach().clone() for place in segment.mutated_inputs}
            self.buffers = {path: module.get_buffer(path).detach().clone() for path in segment.written_buffers}
        layers = Layers(segment.owners, module)
        self.weights = Weights(layers, [module.get_buffer(path) for path in self.buffers])
        self.modes = Modes(layers.all)
        self.versions: list[tuple[int, torch.Tensor, int]] = []

    def remember_versions(self, inputs: Sequence[Any]) -> None:
        """Note the inputs' versions once the forward is through."""
        tensors = [(place, leaf) for place, leaf in enumerate(inputs) if isinstance(leaf, torch.Tensor)]
        self.versions = [(place, leaf, leaf._version) for place, leaf in tensors if place not in self.originals]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self.first:
            self.first = False
            given = [self.changing.pop(place, value) for place, value in enumerate(inputs)]
            with nesting.first_run(self.choices):
                returned = self.segment.forward(self.module, *given)
            self.kept = [_detached(value) for value in returned[self.segment.results :]]
            return returned[: self.segment.results]
        self.weights.check(self.segment.path, self.module, self.segment.owners)
        self._check_inputs()
        given = list(inputs)
        for place, original in self.originals.items():
            given[place] = original.detach().requires_grad_(self.need_grad[place]).clone()
        with (
            as_set(self.modes.changed()),
            self.weights.trained_as_then(),
            buffers_as(self.module, self.buffers),
            nesting.second_run(self.choices),
        ):
            return self.segment.again(self.module, *given, *map(_given, self.kept))

    def _check_inputs(self) -> None:
        for place, tensor, version in self.versions:
            if tensor._version != version:
                raise changed(self.segment.path, f"input {place} was changed in place")


def _detached(value: Any) -> Any:
    """A kept value that holds no graph, and whether it needs a gradient."""
    if isinstance(value, torch.Tensor):
        return (value.detach(), value.requires_grad)
    return [_detached(item) for item in value]


def _given(kept: Any) -> Any:
    """A kept value for one recompute, which may write to it."""
    if isinstance(kept, tuple) and len(kept) == 2 and isinstance(kept[1], bool):
        return kept[0].detach().requires_grad_(kept[1]).clone()
    return [_given(item) for item in kept]
