"""Time the nodes of a piece where the model is, with its own weights and made-up inputs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from rewrite.errors import InputError
from rewrite.memory.fakes import same_random_state
from rewrite.plan.interpret import run_node
from rewrite.plan.outline import Kind

REPETITIONS = 3
"""Runs of each node, of which the fastest counts."""


def node_seconds(kind: Kind) -> dict[str, float]:
    """Seconds of one run of each node of a piece, by name: of the CPU time of this thread, or of the GPU.

    Weights, buffers and random generators stay as they are. Raises InputError for a module without data.
    """
    device = _device(kind.module)
    values: dict[fx.Node, Any] = {}
    given = iter(kind.inputs)
    found: dict[str, float] = {}
    last = {source: node for node in kind.graph.nodes for source in node.all_input_nodes}
    with same_random_state(), _buffers_kept(kind.module), torch.no_grad():
        for node in kind.graph.nodes:
            if node.op == "output":
                break
            if node.op == "placeholder":
                values[node] = _made_up(next(given), device)
                continue
            run = functools.partial(run_node, node, values, kind.module)
            found[node.name], values[node] = _timed(run, node, device)
            for source in node.all_input_nodes:
                if last[source] is node:
                    del values[source]
    return found


def _device(module: nn.Module) -> torch.device:
    tensor = next((each for each in (*module.parameters(), *module.buffers())), torch.empty(0))
    if tensor.is_meta:
        raise InputError("calibrate", "the model is on the meta device, so there is nothing to time", "leave it out")
    return tensor.device


def _timed(run: Callable[[], Any], node: fx.Node, device: torch.device) -> tuple[float, Any]:
    best, value = float("inf"), None
    for _ in range(1 if node.meta.get("writes") else REPETITIONS):
        started = _clock(device)
        value = run()
        best = min(best, _clock(device) - started)
    return best, value


def _clock(device: torch.device) -> float:
    if device.type == "cpu":
        return time.thread_time()
    torch.get_device_module(device).synchronize(device)
    return time.perf_counter()


def _made_up(value: Any, device: torch.device) -> Any:
    """Numbers in place of a fake tensor: normal ones, or zeros, which are an index into anything."""

    def leaf(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        made = torch.zeros(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype, device=device)
        if made.is_floating_point():
            made.normal_()
        return made.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    return torch.utils._pytree.tree_map(leaf, value)


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, content in before:
            buffer.copy_(content)
