"""Frozen parts under DDP and FSDP2, wrapped after the rewrite, with real processes over gloo."""

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
from tests.passes.frozen import batch, bert, products

STEPS = 3
WORLD = 2


def replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.bert.encoder.layer:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WAYS = {"replicated": replicated, "sharded": sharded}
SPEC = "detach-frozen{eval_mode=true,cache=memory},checkpoint"


def train(model: nn.Module, rank: int) -> tuple[list[torch.Tensor], int]:
    """Losses of `STEPS` steps of SGD and then all parameters; how many products the last step ran without autograd.

    In the last step the first batch comes again, on one rank alone.
    """
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    found, without_grad = [], 0
    for number in range(STEPS):
        optimizer.zero_grad()
        again = number + 1 == STEPS and rank == 0
        with products() as modes:
            loss = model(**batch(3, 10 if again else 10 + number + rank)).loss
            loss.backward()
        optimizer.step()
        found.append(loss.detach())
        without_grad = modes.count(False)
    return [*found, *(_whole(parameter) for parameter in model.parameters())], without_grad


def _whole(parameter: Any) -> torch.Tensor:
    whole: torch.Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach().clone()


def build(spec: str = "") -> nn.Module:
    """Dropout is off, as eval_mode changes what is drawn."""
    model = bert(2, 1)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return rewrite.optimize(model, spec, example_inputs=batch()) if spec else model


def worker(rank: int, port: int, folder: str) -> None:
    """One process of the group: trains the plain and the rewritten models in every way and stores what came out."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        results = {name: (train(way(build()), rank), train(way(build(SPEC)), rank)) for name, way in WAYS.items()}
        torch.save(results, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.sweep
def test_frozen_parts_train_as_in_the_plain_model(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes.spawn(worker, (port, str(tmp_path)), nprocs=WORLD)
    alone: dict[str, list[int]] = {}
    for rank in range(WORLD):
        for name, ((expected, _), (found, without_grad)) in torch.load(tmp_path / f"{rank}.pt").items():
            assert len(expected) == len(found) > STEPS
            for one, other in zip(expected, found, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
            alone.setdefault(name, []).append(without_grad)
    assert alone["replicated"][0] < alone["replicated"][1]  # kept where it came again, each rank for itself
    assert alone["sharded"][0] == alone["sharded"][1]  # not kept: all ranks have to gather the weights
