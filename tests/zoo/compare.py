"""Runs one training step and compares two of them bit for bit: the oracle of the tests, apart from `rewrite.verify`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import numpy
import torch
from torch import nn


@dataclass(frozen=True)
class Run:
    """What one step left behind; every tensor is a copy."""

    loss: torch.Tensor
    outputs: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    rng_state: torch.Tensor


def run(model: nn.Module, inputs: Mapping[str, Any], seed: int = 0, train: bool = True) -> Run:
    """Forward and backward under `seed`, in train or eval mode; gradients, buffers, modes and RNG are put back."""
    modes = [(module, module.training) for module in model.modules()]
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    before = {name: buffer.clone() for name, buffer in _buffers(model)}
    random_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            return _step(model, inputs, seed, train)
    finally:
        random.setstate(random_state)
        numpy.random.set_state(numpy_state)
        for parameter, grad in kept:
            parameter.grad = grad
        with torch.no_grad():
            for name, buffer in _buffers(model):
                if name in before and not torch.equal(buffer, before[name]):
                    buffer.copy_(before[name])
        for module, training in modes:
            module.training = training


def assert_equal(expected: Run, found: Run) -> None:
    """Bit-equal in every value, NaN equal to NaN; the message lists what differs, loss first."""
    differing = [*_differences("loss", {"": expected.loss}, {"": found.loss})]
    for kind in ("outputs", "grads", "buffers"):
        differing += _differences(kind, getattr(expected, kind), getattr(found, kind))
    differing += _differences("rng state", {"": expected.rng_state}, {"": found.rng_state})
    assert not differing, f"{len(differing)} values differ:\n" + "\n".join(differing[:12])


def loss_of(output: Any) -> torch.Tensor:
    """The loss of a model's output: its `loss`, the first of a tuple, or the tensor itself."""
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, tuple):
        return loss_of(output[0])
    return loss_of(output["loss"] if isinstance(output, Mapping) else output.loss)


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor inside an output with its path, also those of a cache object."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if isinstance(value, Mapping):
        children: Any = value.items()
    elif isinstance(value, list | tuple):
        children = enumerate(value)
    elif is_dataclass(value) or type(value).__name__.endswith(("Cache", "Layer")):
        children = vars(value).items()
    else:
        return
    for name, child in children:
        yield from tensors(child, f"{path}.{name}" if path else str(name))


def _step(model: nn.Module, inputs: Mapping[str, Any], seed: int, train: bool) -> Run:
    model.train(train)
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    output = model(**inputs)
    loss = loss_of(output)
    outputs = {name: tensor.detach().clone() for name, tensor in tensors(output)}
    loss.sum().backward()
    return Run(
        loss.detach().clone(),
        outputs,
        {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        {name: buffer.clone() for name, buffer in _buffers(model)},
        torch.get_rng_state(),
    )


def _buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return list(model.named_buffers())


def _differences(
    kind: str, expected: Mapping[str, torch.Tensor | None], found: Mapping[str, torch.Tensor | None]
) -> Iterator[str]:
    if expected.keys() != found.keys():
        yield f"  {kind}: names differ: {sorted(set(expected) ^ set(found))[:6]}"
    for name in expected.keys() & found.keys():
        if reason := _difference(expected[name], found[name]):
            yield f"  {kind} {name}: {reason}"


def _difference(expected: torch.Tensor | None, found: torch.Tensor | None) -> str:
    if expected is None or found is None:
        return "" if expected is found else f"{'nothing' if found is None else 'a value'} where the other has one"
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return f"{expected.dtype} {tuple(expected.shape)} became {found.dtype} {tuple(found.shape)}"
    if torch.equal(expected, found) or expected.numel() == 0:
        return ""
    if not expected.is_floating_point():
        return f"{int((expected != found).sum())} of {expected.numel()} elements"
    same = (expected == found) | (expected.isnan() & found.isnan())
    if bool(same.all()):
        return ""
    gap = (expected.double() - found.double()).abs().nan_to_num()
    return f"{int((~same).sum())} of {expected.numel()} elements, largest difference {gap.max():.3g}"
