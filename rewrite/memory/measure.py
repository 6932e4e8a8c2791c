"""From the events of a run to the estimate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from rewrite.memory.loss import NO_LOSS, OUTSIDE
from rewrite.memory.ready import make_ready
from rewrite.memory.step import Run, run_step
from rewrite.memory.timeline import CATEGORIES, Estimate, Flops, Held, Peak, SavedAt
from rewrite.memory.tracker import Storage

LARGEST = 12
CURVE_POINTS = 240

NOT_COUNTED = {
    "cpu": (
        "what kernels and libraries allocate beside torch's allocator (oneDNN and BLAS scratch, thread stacks)",
        "oneDNN's scratch of products in half precision, on processors with instructions for them",
    ),
    "cuda": (
        "the CUDA context and kernels (several hundred MiB)",
        "cuBLAS and cuDNN workspaces",
        "NCCL buffers",
        "fragmentation and rounding in the caching allocator",
    ),
}


def estimate_step(
    module: nn.Module,
    example_inputs: Any,
    *,
    optimizer: str | None = None,
    device: str | None = None,
    train: bool = True,
    real: bool = False,
) -> Estimate:
    """Measure one training step of `module` by running it on fake tensors, with nothing allocated.

    `example_inputs`: a dict (named), a tuple or list (positional), or one tensor. `optimizer`: one of
    `optimizer.OPTIMIZERS`, whose state then counts as alive through the whole step. `device`: "cpu" (default), or
    "cuda" to plan for one on any machine. `train=False` runs the forward alone, in eval mode. `real=True` runs the
    same on copies of the real tensors. The module, its gradients and the random generators stay as they were; a module
    on the meta device is fine. Raises InputError for unknown names and inputs that do not fit, and whatever the
    forward raises.
    """
    device = device or "cpu"
    make_ready(module, example_inputs, train=train)
    run = run_step(module, example_inputs, optimizer=optimizer, device=device, train=train, real=real)
    return summarise(run, optimizer=None if optimizer == "none" else optimizer, device=device)


def summarise(run: Run, *, optimizer: str | None, device: str) -> Estimate:
    """The figures of a run."""
    at, peak_bytes, phases, curve = _levels(run)
    alive = _alive_after(run, at)
    last, _, phase = run.events[at] if run.events else (None, 0, "forward")
    by_category = dict.fromkeys(CATEGORIES, 0)
    for storage, size in alive.items():
        by_category[storage.category] += size
    place = last.place if last is not None else None
    largest = sorted(alive.items(), key=lambda item: -item[1])[:LARGEST]
    peak = Peak(
        bytes=peak_bytes,
        phase=phase,
        module_path=place.module_path if place else "",
        region=place.region if place else "",
        node=place.node if place else "",
        largest=tuple(_held(storage, size) for storage, size in largest),
    )
    return Estimate(
        peak_bytes=peak_bytes,
        saved_bytes=sum(storage.bytes for storage in run.saved),
        by_category=by_category,
        peak=peak,
        phases=phases,
        curve=curve,
        saved=_saved_places(run.saved),
        flops=Flops(run.tally.flops["forward"], run.tally.flops["backward"]),
        moved_bytes=run.tally.moved_bytes(),
        work=run.tally.work(),
        device=device,
        optimizer=optimizer,
        loss=run.loss,
        assumptions=run.assumptions,
        not_counted=(*([OUTSIDE] if run.loss == NO_LOSS else []), *NOT_COUNTED[device]),
        forward_calls=run.calls,
    )


def _levels(run: Run) -> tuple[int, int, dict[str, int], tuple[tuple[str, int], ...]]:
    """Position and height of the peak, the highest level of each phase, and the curve."""
    level = peak_bytes = at = 0
    phases: dict[str, int] = {}
    levels: list[tuple[str, int]] = []
    for position, (_, change, phase) in enumerate(run.events):
        if phase not in phases:
            phases[phase] = level
        level += change
        levels.append((phase, level))
        phases[phase] = max(phases[phase], level)
        if level > peak_bytes:
            peak_bytes, at = level, position
    return at, peak_bytes, phases, _thinned(levels)


def _thinned(levels: list[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """The highest point of each span, spans never crossing a phase."""
    span = max(1, len(levels) // CURVE_POINTS)
    points: list[tuple[str, int]] = []
    taken = span
    for phase, level in levels:
        if taken >= span or points[-1][0] != phase:
            points.append((phase, level))
            taken = 1
            continue
        points[-1] = (phase, max(points[-1][1], level))
        taken += 1
    return tuple(points)


def _alive_after(run: Run, at: int) -> dict[Storage, int]:
    alive: dict[Storage, int] = {}
    for storage, change, _ in run.events[: at + 1]:
        alive[storage] = alive.get(storage, 0) + change
    return {storage: size for storage, size in alive.items() if size}


def _held(storage: Storage, size: int) -> Held:
    place = storage.place
    return Held(size, storage.shape, storage.dtype, storage.category, place.module_path, place.node)


def _saved_places(saved: Iterable[Storage]) -> tuple[SavedAt, ...]:
    totals: dict[tuple[Any, ...], int] = {}
    for storage in saved:
        place = storage.place
        key = (place.module_path, place.node, place.region, storage.shape, storage.dtype)
        totals[key] = totals.get(key, 0) + storage.bytes
    return tuple(
        SavedAt(path, node, region, size, shape, dtype) for (path, node, region, shape, dtype), size in totals.items()
    )
