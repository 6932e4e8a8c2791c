"""Reports of recomputation under data parallelism, replayed with real processes over gloo."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rewrite
from tests.cases.recomputed import planned_between, recomputed
from tests.zoo.plain import GatedBlock

PLANNED = "to a budget"
STEPS = 3
WORLD = 2


class Twice(nn.Module):
    """Blocks of which the first is applied twice, in a row and once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GatedBlock(16) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for place in (0, 0, 1, 2, 0):
            hidden = self.blocks[place](hidden)
        return hidden.pow(2).mean()


def build() -> nn.Module:
    torch.manual_seed(0)
    return Twice().train()


def train(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """`STEPS` steps of SGD on this rank's batches; the trained parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        hidden = torch.randn(4, 16)
        optimizer.zero_grad()
        model(hidden).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def worker(rank: int, port: int, spec: str, folder: str) -> None:
    """One process of the group: trains the plain and the rewritten model and stores whether they are equal."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        expected = train(DistributedDataParallel(build()), rank)
        hidden = torch.randn(256, 16)  # large enough for recompute to lower the peak
        spec = planned_between(build(), hidden) if spec == PLANNED else spec
        small = rewrite.optimize(build(), spec, example_inputs=hidden)
        found = train(DistributedDataParallel(small), rank)
        start = list(build().parameters())
        torch.save(
            {
                "recomputed": recomputed(small),
                "equal": all(torch.equal(a, b) for a, b in zip(expected, found, strict=True)),
                "moved": not torch.equal(start[0], found[0]),
                "found": found,
            },
            Path(folder) / f"{rank}.pt",
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("spec", [PLANNED, "checkpoint", "checkpoint{policy=sqrt}"])
def test_a_block_applied_twice_trains_under_data_parallelism(spec: str, tmp_path: Path) -> None:
    """huggingface/transformers#23018: "marked ready twice" when a recomputed block is used more than once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes.spawn(worker, (port, spec, str(tmp_path)), nprocs=WORLD)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    assert all({"blocks.0", "blocks.1", "blocks.2"} <= result["recomputed"] for result in results)
    assert all(result["equal"] and result["moved"] for result in results)
    assert all(torch.equal(a, b) for a, b in zip(results[0]["found"], results[1]["found"], strict=True))
