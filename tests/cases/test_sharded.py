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
from transformers import BertConfig, BertForMaskedLM

import rewrite
from rewrite.errors import BudgetError
from tests.cases.recomputed import planned_between, recomputed
from tests.zoo import ZOO

PLANNED, LOWEST = "to a budget", "to the lowest peak"
STEPS = 3
WORLD = 2


def deep() -> torch.nn.Module:
    """A BERT of which what passes between layers is much of what a recompute holds: the lowest plan groups them."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=64, intermediate_size=16, num_hidden_layers=6, num_attention_heads=2,
    )  # fmt: skip
    return BertForMaskedLM(config)


def lowest(batch: dict[str, torch.Tensor]) -> torch.nn.Module:
    """It, with that plan."""
    with pytest.raises(BudgetError) as raised:
        rewrite.optimize(deep(), "checkpoint{budget=1}", example_inputs=batch)
    small = rewrite.optimize(deep(), f"checkpoint{{budget={raised.value.lowest_bytes}}}", example_inputs=batch)
    assert any("hold nothing of what" in change.summary for change in rewrite.report(small).changes)
    return small


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
        if spec == LOWEST:
            ids = torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(0))
            batch = {"input_ids": ids, "labels": ids}
            plain, small = deep(), lowest(batch)
        else:
            plain = entry.build()
            spec = planned_between(plain, batch) if spec == PLANNED else spec
            small = rewrite.optimize(entry.build(), spec, example_inputs=batch)
        assert any(path.startswith("bert.encoder.layer.") for path in recomputed(small))
        torch.save((train(plain, batch), train(small, batch)), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.thinned(3)
@pytest.mark.parametrize("spec", [PLANNED, LOWEST, "checkpoint", "checkpoint{policy=sqrt}"])
def test_sharded_blocks_train_as_the_plain_ones(spec: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    processes.spawn(worker, (port, spec, str(tmp_path)), nprocs=WORLD)

    (losses, parameters), (found_losses, found) = torch.load(tmp_path / "0.pt")
    assert found_losses == losses
    assert len(set(losses)) == STEPS
    assert all(torch.equal(one, other) for one, other in zip(parameters, found, strict=True))
