"""Recomputed blocks under FSDP2, sharded one by one after the rewrite, with real processes over gloo."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rewrite
from tests.cases.recomputed import planned_between, recomputed
from tests.zoo import ZOO

PLANNED = "to a budget"
STEPS = 3
WORLD = 2


def train(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of `STEPS` steps of SGD, each block and the whole sharded, and the full parameters after them."""
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.bert.encoder.layer:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


def worker(rank: int, port: int, spec: str, folder: str) -> None:
    """One process of the group: trains the plain and the rewritten model and stores what came out of both."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        entry = ZOO["bert"]
        batch = entry.inputs(8, 32)  # large enough for recompute to lower the peak
        spec = planned_between(entry.build(), batch) if spec == PLANNED else spec
        small = rewrite.optimize(entry.build(), spec, example_inputs=batch)
        assert any(path.startswith("bert.encoder.layer.") for path in recomputed(small))
        torch.save((train(entry.build(), batch), train(small, batch)), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("spec", [PLANNED, "checkpoint", "checkpoint{policy=sqrt}"])
def test_sharded_blocks_train_as_the_plain_ones(spec: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    processes.spawn(worker, (port, spec, str(tmp_path)), nprocs=WORLD)

    (losses, parameters), (found_losses, found) = torch.load(tmp_path / "0.pt")
    assert found_losses == losses
    assert len(set(losses)) == STEPS
    assert all(torch.equal(one, other) for one, other in zip(parameters, found, strict=True))
