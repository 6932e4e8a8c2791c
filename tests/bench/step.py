"""One method on one model: the bytes, operations and numbers of a step. Times are in timing.py."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import torch
import torch._dynamo  # imported by the first checkpoint otherwise, as if that took time to prepare

from tests.bench import account
from tests.bench.flops import step_flops
from tests.bench.methods import changes
from tests.bench.models import Entry
from tests.bench.resident_set import resident_rise_bytes
from tests.bench.workload import SEED, Workload


@dataclass(frozen=True)
class Memory:
    """Bytes of a step by the allocator's account. A step starts without gradients and ends with all of them."""

    resident_bytes: int
    """Parameters, buffers and the batch."""
    peak_bytes: int
    """The most held on top of them at once, gradients included."""
    activation_peak_bytes: int
    """The most held on top of them and of the gradients made so far."""
    saved_bytes: int
    """Held after the forward, when nothing but the loss is left of what it returned."""
    gradient_bytes: int
    resident_set_rise_bytes: int | None
    """What `peak_bytes` is to the kernel."""


@dataclass(frozen=True)
class Numbers:
    """How far a first step from the same weights and seed is from eager's; 0 is bit-equal."""

    loss_error: float
    """|difference| / |eager|."""
    gradient_error: float
    """L2 norm of the difference over that of eager, all gradients together; infinite if other parameters have one."""
    buffer_error: float
    """The same of the floating-point buffers, such as running statistics."""


@dataclass(frozen=True)
class Measured:
    """All that needs a process of its own."""

    memory: Memory
    flops: int
    """Matrix products, convolutions and attention of forward, backward and recompute; two for a multiply-add."""
    preparation_seconds: float
    """CPU time of applying the method, and of its first step beyond what its second took."""
    numbers: Numbers


@dataclass(frozen=True)
class State:
    """What a first step left."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def measure(entry: Entry, method: str) -> Measured:
    """Run `method` on the model for some steps."""
    workload, applied = entry.build(), changes(method)
    started = time.process_time()
    for change in applied:
        change(workload)
    loss = workload.step()
    first = time.process_time() - started
    state = _state(workload, loss)
    del loss
    started = time.process_time()
    workload.step()
    preparation = max(0.0, first - (time.process_time() - started))
    memory = measure_memory(workload)
    flops = step_flops(workload.step)
    del workload
    return Measured(memory, flops, preparation, compare(state, eager_state(entry)))


def measure_memory(workload: Workload) -> Memory:
    """A step outside the profiler for the kernel's account, then one inside it."""
    workload.model.zero_grad(set_to_none=True)
    gc.collect()
    rise = resident_rise_bytes(workload.step)
    workload.model.zero_grad(set_to_none=True)
    gc.collect()
    torch.manual_seed(SEED)
    loss, forward = account.watched(workload.forward)
    _, backward = account.watched(loss.backward)
    gradients = workload.gradients()
    return Memory(
        resident_bytes=workload.resident_bytes(),
        peak_bytes=account.rise_bytes([*forward, *backward]),
        activation_peak_bytes=account.rise_bytes(account.without([*forward, *backward], gradients)),
        saved_bytes=account.level_bytes(forward),
        gradient_bytes=sum(gradient.untyped_storage().nbytes() for gradient in gradients),
        resident_set_rise_bytes=rise,
    )


def eager_state(entry: Entry) -> State:
    """After a first step without any method."""
    workload = entry.build()
    return _state(workload, workload.step())


def _state(workload: Workload, loss: torch.Tensor) -> State:
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in workload.model.named_parameters()
        if parameter.grad is not None
    }
    buffers = {name: buffer.clone() for name, buffer in workload.model.named_buffers() if buffer.is_floating_point()}
    return State(loss.clone(), gradients, buffers)


def compare(state: State, eager: State) -> Numbers:
    """`state` beside eager's, which it should equal."""
    return Numbers(
        relative_error({"loss": state.loss}, {"loss": eager.loss}),
        relative_error(state.gradients, eager.gradients),
        relative_error(state.buffers, eager.buffers),
    )


def relative_error(values: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm of `expected`, in float64."""
    if values.keys() != expected.keys():
        return float("inf")
    difference = sum(
        float((values[name].double() - wanted.double()).square().sum()) for name, wanted in expected.items()
    )
    norm = sum(float(wanted.double().square().sum()) for wanted in expected.values())
    if difference == 0:
        return 0.0
    return float((difference / norm) ** 0.5) if norm else float("inf")
