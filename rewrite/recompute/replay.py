"""The surroundings of a forward - random numbers, autocast, attention backends - brought back for a recompute."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from rewrite.capture.surroundings import attention
from rewrite.recompute.tensors import detached

RandomState = tuple[tuple[torch.device, torch.Tensor], ...]
"""Devices, the CPU first, and the state of the generator of each."""

Surroundings = tuple[Any, ...]

_REPLAYING = threading.RLock()
_AS_IT_IS = contextlib.nullcontext()
_CPU = torch.device("cpu")
_CASTING = ("cpu", "cuda")


def random_state(devices: Iterable[torch.device]) -> RandomState:
    """The state of the CPU's generator, and of those of `devices`."""
    others = [device for device in devices if device.type != "cpu" and device.type != "meta"]
    states = [(device, torch.get_device_module(device).get_rng_state(device)) for device in others]
    # Copies, for a run on fake tensors, which draw nothing, to count what is held.
    return tuple((device, state.clone()) for device, state in ((_CPU, torch.get_rng_state()), *states))


def set_random_state(state: RandomState) -> None:
    """Have the generators go on from `state`."""
    for device, content in state:
        if isinstance(content, FakeTensor):
            continue
        if device.type == "cpu":
            torch.set_rng_state(content)
        else:
            torch.get_device_module(device).set_rng_state(content, device)


def replayed(state: RandomState, function: Callable[[], Any]) -> Any:
    """What `function` gives with the random numbers from `state` on; the generators go on as if it had not run.

    One thread at a time: the generators are the process's.
    """
    with _REPLAYING:
        before = random_state(device for device, _ in state)
        set_random_state(state)
        try:
            return function()
        finally:
            set_random_state(before)


def graded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function` gives in grad mode, without its graph: run again, or detached, as it ran in the original."""
    with torch.enable_grad():
        return detached(function(*args, **kwargs))


def surroundings() -> Surroundings:
    """What decides how an operator computes, beside its arguments."""
    cpu, cuda = _CASTING
    return (
        torch.get_autocast_dtype(cpu) if torch.is_autocast_enabled(cpu) else None,
        torch.get_autocast_dtype(cuda) if torch.is_autocast_enabled(cuda) else None,
        *attention(),
    )


def as_surrounded(then: Surroundings) -> contextlib.AbstractContextManager[Any]:
    """Compute without recording, in the surroundings of the forward."""
    now = surroundings()
    if now == then and now[:2] == (None, None):
        return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS  # a backward does not record anyway
    return _brought_back(now, then)


@contextlib.contextmanager
def _brought_back(now: Surroundings, then: Surroundings) -> Iterator[None]:
    with torch.no_grad(), contextlib.ExitStack() as stack:
        for kind, dtype in zip(_CASTING, then[:2], strict=True):
            # A cache of casts made here would be read by whoever trains next: it holds no graph.
            stack.enter_context(torch.autocast(kind, dtype, dtype is not None, cache_enabled=False))
        _set_attention(then[2:])
        stack.callback(_set_attention, now[2:])
        yield


def _set_attention(enabled: Surroundings) -> None:
    backends = torch.backends.cuda
    backends.enable_flash_sdp(enabled[0])
    backends.enable_mem_efficient_sdp(enabled[1])
    backends.enable_math_sdp(enabled[2])
