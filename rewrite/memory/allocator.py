"""The outside check: what torch's own CPU allocator hands out during a real step."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from rewrite.memory.fakes import Clones, same_random_state, swapped
from rewrite.memory.loss import pick_loss
from rewrite.memory.optimizer import build_optimizer
from rewrite.memory.step import inputs_as_call


def allocated_peak_bytes(module: nn.Module, example_inputs: Any, *, optimizer: str | None = None) -> int:
    """Peak of a real CPU training step by the allocator's own account: what was there before, and the most on top.

    Runs on copies of the module's tensors; the module stays as it was.
    """
    convert = Clones()
    with same_random_state(), contextlib.ExitStack() as around:
        around.enter_context(swapped(module, convert))
        args, kwargs = inputs_as_call(example_inputs, convert)
        stepper = build_optimizer(optimizer, module, "cpu")
        state = list(stepper.state_tensors()) if stepper is not None else []
        held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for _, t in convert.pairs()}
        held.update({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in state})

        def step() -> None:
            loss, _ = pick_loss(module(*args, **kwargs))
            loss.backward()
            if stepper is not None:
                stepper.step()

        rise = allocated_rise_bytes(step)
        idle = [parameter for parameter in module.parameters() if parameter.grad is None] if stepper else []
        for absent in (state for parameter in idle if stepper for state in stepper.state_of(parameter)):
            held.pop(absent.untyped_storage()._cdata, None)
        return sum(held.values()) + rise


def allocated_rise_bytes(run: Callable[[], object]) -> int:
    """The most the CPU allocator held while `run` ran, above what it held before."""
    gc.collect()  # what was garbage before would be given back in the middle, and the rise look smaller
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    changes = memory_events(profiled)
    level = peak = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        level += change
        peak = max(peak, level)
    return peak


def memory_events(profiled: profile) -> list[tuple[int, int]]:
    """(time in ns, change in bytes) of each allocation and release the profiler saw."""
    assert profiled.profiler is not None
    results = profiled.profiler.kineto_results
    assert results is not None
    events: list[Any] = [event for event in results.events() if event.name() == "[memory]"]
    return [(event.start_ns(), event.nbytes()) for event in events]


def requested_peak_bytes(run: Callable[[], object]) -> int:
    """The most the CUDA allocator was asked for while `run` ran (not what it rounded that up to)."""
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])
