"""Chunked spans and losses under data parallelism and sharding, with real processes over gloo."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rewrite
from tests.cases.test_chunking import batch, llama

STEPS = 3
WORLD = 2
SPEC = "chunk-ffn{chunks=4},chunk-loss{chunks=4}"


def train(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """`STEPS` steps of SGD on this rank's batches; the losses, then the gradients of the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch(2, 20 + 7 * rank + number)).loss
        loss.backward()
        found.append(loss.detach())
        if number + 1 < STEPS:
            optimizer.step()
    return [*found, *(whole(parameter.grad) for parameter in model.parameters())]


def whole(gradient: Any) -> torch.Tensor:
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).detach().clone()


def replicated(model: nn.Module, **flags: bool) -> nn.Module:
    return DistributedDataParallel(model, **flags)


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WAYS: dict[str, Any] = {
    "default": replicated,
    "static graph": lambda model: replicated(model, static_graph=True),
    "unused parameters": lambda model: replicated(model, find_unused_parameters=True),
    "sharded": sharded,
}


def worker(rank: int, port: int, spec: str, folder: str) -> None:
    """One process of the group: trains the plain and the rewritten model in every way and stores what came out."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        results = {}
        for name, way in WAYS.items():
            small = rewrite.optimize(llama(), spec, example_inputs=batch())
            results[name] = (train(way(llama()), rank), train(way(small), rank))
        torch.save(results, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("spec", [SPEC, f"{SPEC},checkpoint"])
def test_gradients_are_those_of_the_plain_model(spec: str, tmp_path: Path) -> None:
    """huggingface/kernels-community#1081: a backward for each chunk fired the hooks of DDP once for each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes.spawn(worker, (port, spec, str(tmp_path)), nprocs=WORLD)
    for rank in range(WORLD):
        for name, (expected, found) in torch.load(tmp_path / f"{rank}.pt").items():
            assert len(expected) == len(found) > STEPS
            for one, other in zip(expected, found, strict=True):
                assert (one - other).norm() <= 5e-6 * one.norm(), name


def test_gradients_of_chosen_parameters() -> None:
    """The same report: `autograd.grad` gave None and wrote to `.grad`."""
    model = llama()
    small = rewrite.optimize(model, SPEC, example_inputs=batch())
    wanted = [p for name, p in model.named_parameters() if "mlp" in name or "head" in name]
    expected = torch.autograd.grad(model(**batch()).loss, wanted)
    found = torch.autograd.grad(small(**batch()).loss, wanted)
    assert all(parameter.grad is None for parameter in model.parameters())
    for one, other in zip(expected, found, strict=True):
        assert (one - other).norm() <= 2e-6 * one.norm()
