"""The seam between a recompute segment and how its values are had again in the backward.

The users of `recompute` know only: it gives what `segment(module, *inputs)` gives, and holds the inputs instead of the
values inside. Here torch's non-reentrant checkpoint does the work, with what it leaves open closed: buffers are
written once, inputs changed in place are kept as they were, and a weight or input changed between forward and
backward raises instead of giving wrong gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from rewrite.errors import RecomputeError


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
    parameters: tuple[str, ...]
    """Paths below the region's module of the parameters the segment may read."""
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
        self.kept: list[Any] = []
        with torch.no_grad():
            self.originals = {place: inputs[place].detach().clone() for place in segment.mutated_inputs}
            self.buffers = {path: _buffer(module, path).detach().clone() for path in segment.written_buffers}
        self.parameters = [(path, parameter, parameter._version) for path, parameter in _parameters(module, segment)]
        self.versions: list[tuple[int, torch.Tensor, int]] = []

    def remember_versions(self, inputs: Sequence[Any]) -> None:
        """Note the inputs' versions once the forward is through."""
        tensors = [(place, leaf) for place, leaf in enumerate(inputs) if isinstance(leaf, torch.Tensor)]
        self.versions = [(place, leaf, leaf._version) for place, leaf in tensors if place not in self.originals]

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        if self.first:
            self.first = False
            given = [self.changing.pop(place, value) for place, value in enumerate(inputs)]
            returned = self.segment.forward(self.module, *given)
            self.kept = [_detached(value) for value in returned[self.segment.results :]]
            return returned[: self.segment.results]
        self._check_unchanged()
        given = list(inputs)
        for place, original in self.originals.items():
            given[place] = original.detach().requires_grad_(self.need_grad[place]).clone()
        with _buffers_as_they_were(self.module, self.buffers):
            return self.segment.again(self.module, *given, *map(_given, self.kept))

    def _check_unchanged(self) -> None:
        for path, parameter, version in self.parameters:
            found = _lookup(self.module, path)
            if found is not parameter and not any(type(each).__name__ == "DTensor" for each in (found, parameter)):
                raise _changed(self.segment.path, f"parameter {path!r} was replaced")
            if found is parameter and parameter._version != version:
                raise _changed(self.segment.path, f"parameter {path!r} was changed in place")
        for place, tensor, version in self.versions:
            if tensor._version != version:
                raise _changed(self.segment.path, f"input {place} was changed in place")


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


def _changed(path: str, what: str) -> RecomputeError:
    return RecomputeError(
        f"recompute of {path or 'the model'!r}",
        f"{what} between the forward and the backward that recomputes from it",
        "call backward before the optimizer step (or before the in-place change), or leave it out of Checkpoint",
    )


def _parameters(module: nn.Module, segment: Recomputed) -> Iterator[tuple[str, torch.Tensor]]:
    for path in segment.parameters:
        if path.endswith(".*"):
            owner = path[:-2]
            yield from ((f"{owner}.{name}", found) for name, found in module.get_submodule(owner).named_parameters())
            continue
        found = _lookup(module, path)
        if isinstance(found, torch.Tensor) and path not in segment.written_buffers:
            yield path, found


def _lookup(module: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    try:
        return getattr(module.get_submodule(owner), name)
    except AttributeError:
        return None


def _buffer(module: nn.Module, path: str) -> torch.Tensor:
    return module.get_buffer(path)


@contextlib.contextmanager
def _buffers_as_they_were(module: nn.Module, before: dict[str, torch.Tensor]) -> Iterator[None]:
    """Let a recompute read, and write, copies of the buffers from before the forward."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for path, content in before.items():
        owner, _, name = path.rpartition(".")
        table = module.get_submodule(owner)._buffers
        replaced.append((table, name, table[name]))
        table[name] = content.clone()
    try:
        yield
    finally:
        for table, name, buffer in replaced:
            table[name] = buffer
