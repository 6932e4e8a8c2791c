"""One training step of a module, recorded, after which the module and the random streams are as they were."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_DEPTH = 8
"""How deep tensors are looked for inside the objects of an output."""


@dataclass(frozen=True)
class Observation:
    """What one step computed; every tensor is a copy of its own."""

    loss: torch.Tensor
    outputs: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor | None]
    """By parameter name, then by `input.<path>` for the inputs that require a gradient."""
    buffers: Mapping[str, torch.Tensor]
    streams: Mapping[str, Any]
    """State of each random stream after the backward: "torch", "cuda:0", "python", "numpy"."""
    hook_calls: Mapping[str, int]
    """How often the modules that carry hooks were called, by path."""
    dropped: frozenset[str] = frozenset()
    """Outputs that a pass was told to leave out; they cannot be read."""


def observe(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, seed: int, train: bool, scale: float = 1.0
) -> Observation:
    """Forward and backward of `module` under `seed`, in train or eval mode.

    `scale` multiplies what is differentiated, and its inverse the gradients, as a loss scaler does.

    Tensors are given as copies. Gradients, buffers, modes and random streams are put back, also after an error, which
    is the module's own and passes through.
    """
    args, kwargs = copied(args), copied(dict(kwargs))
    with _kept(module), _streams_kept(module):
        module.train(train)
        for parameter in module.parameters():
            parameter.grad = None
        _seed(seed)
        with _counted_hooks(module) as hook_calls:
            output = module(*args, **kwargs)
            loss = objective(output)
            found = dict(tensors(output))
            dropped = frozenset(path for path, tensor in found.items() if getattr(tensor, "is_dropped", False))
            outputs = {path: _copy(tensor) for path, tensor in found.items() if path not in dropped}
            if loss.requires_grad:
                (loss if scale == 1 else loss * scale).backward()
        given = [(path, tensor) for path, tensor in tensors((args, kwargs), "input") if tensor.requires_grad]
        leaves = [*module.named_parameters(), *given]
        return Observation(
            _copy(loss),
            outputs,
            {name: None if leaf.grad is None else _unscaled(leaf.grad, scale) for name, leaf in leaves},
            {name: _copy(buffer) for name, buffer in module.named_buffers()},
            _streams(module),
            dict(hook_calls),
            dropped,
        )


def observe_outputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, seed: int
) -> Mapping[str, torch.Tensor]:
    """What the forward of `module` gives under `seed`, in the mode it is in, by path; dropped outputs are left out.

    All is put back as by `observe`.
    """
    args, kwargs = copied(args), copied(dict(kwargs))
    with _kept(module), _streams_kept(module), torch.enable_grad():
        _seed(seed)
        found = tensors(module(*args, **kwargs))
        return {path: _copy(tensor) for path, tensor in found if not getattr(tensor, "is_dropped", False)}


def objective(output: Any) -> torch.Tensor:
    """The number a step differentiates: the output's loss, or its one scalar, or else a weighted sum of its tensors.

    The weights differ from element to element, so that a gradient cannot hide behind a sum that is constant, such as
    that of a softmax.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss.sum()
    found = [tensor for _, tensor in tensors(output) if tensor.is_floating_point()]
    if found and found[0].numel() == 1:
        return found[0].sum()
    differentiable = [tensor for tensor in found if tensor.requires_grad]
    return torch.stack([_weighted_sum(tensor) for tensor in differentiable or found] or [torch.zeros(())]).sum()


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor inside `value` with its path, also those inside objects such as a key-value cache."""
    return _walk(value, path, set(), 0)


def copied(value: Any) -> Any:
    """`value` with tensors of its own, which require a gradient where the given ones do."""

    def leaf(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.detach().clone().requires_grad_(item.requires_grad)
        return copy.deepcopy(item)

    return pytree.tree_map(leaf, value)


def _walk(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if depth > _DEPTH or id(value) in seen:
        return
    children: Any = ()
    if isinstance(value, Mapping):
        children = value.items()
    elif isinstance(value, list | tuple):
        children = enumerate(value)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
        children = vars(value).items()
    seen.add(id(value))
    for name, child in children:
        yield from _walk(child, f"{path}.{name}" if path else str(name), seen, depth + 1)


def _weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(0.5, 1.5, max(tensor.numel(), 1), device=tensor.device)[: tensor.numel()]
    return (tensor.float() * weights.view(tensor.shape)).sum()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _unscaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """A copy, in fp32 where a half-precision one divided by `scale` would underflow."""
    if scale == 1:
        return _copy(gradient)
    return gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32)) / scale


@contextlib.contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [
        (part, name, buffer, None if buffer is None else _copy(buffer))
        for part in module.modules()
        for name, buffer in part._buffers.items()
    ]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for part, name, buffer, value in buffers:
            part._buffers[name] = buffer
            if buffer is not None and value is not None and not _same(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bool(((left == right) | ((left != left) & (right != right))).all())


@contextlib.contextmanager
def _counted_hooks(module: nn.Module) -> Iterator[dict[str, int]]:
    """Counts the calls of every module that carries a forward hook or pre-hook."""
    counts: dict[str, int] = {}
    handles = []

    def counter(path: str) -> Any:
        def count(*_: Any) -> None:
            counts[path] += 1

        return count

    for path, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks:
            counts[path] = 0
            handles.append(part.register_forward_pre_hook(counter(path)))
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def _devices(module: nn.Module) -> list[torch.device]:
    places = {tensor.device for tensor in (*module.parameters(), *module.buffers()) if tensor.device.type == "cuda"}
    return sorted(places, key=str)


def _streams(module: nn.Module) -> dict[str, Any]:
    streams: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    streams.update({str(device): torch.cuda.get_rng_state(device) for device in _devices(module)})
    if (numpy := sys.modules.get("numpy")) is not None:
        streams["numpy"] = numpy.random.get_state()
    return streams


@contextlib.contextmanager
def _streams_kept(module: nn.Module) -> Iterator[None]:
    streams = _streams(module)
    try:
        yield
    finally:
        torch.set_rng_state(streams["torch"])
        random.setstate(streams["python"])
        for device in _devices(module):
            torch.cuda.set_rng_state(streams[str(device)], device)
        if (numpy := sys.modules.get("numpy")) is not None and "numpy" in streams:
            numpy.random.set_state(streams["numpy"])


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
