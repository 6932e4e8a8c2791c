"""Mixed precision under data parallelism and sharding, with real processes over gloo."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn

import rewrite
from rewrite import weight_casts
from tests.cases.test_chunking import batch, llama
from tests.cases.test_chunking_distributed import WORLD, replicated, sharded, whole

STEPS = 3
WAYS: dict[str, Any] = {
    "replicated": replicated,
    "sharded": sharded,
}


def train(model: nn.Module, *, ambient: bool) -> list[torch.Tensor]:
    """Steps of SGD on a batch that every rank has; the losses, then the gradients of the last, then the weights.

    With `ambient` the forward runs in the caller's autocast.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    around = torch.autocast("cpu", dtype=torch.bfloat16) if ambient else contextlib.nullcontext()
    found = []
    for number in range(STEPS):
        optimizer.zero_grad()
        torch.manual_seed(number)
        with around:
            loss = model(**batch(2, 20 + number)).loss
        loss.backward()
        found.append(loss.detach())
        if number + 1 < STEPS:
            optimizer.step()
    parameters = list(model.parameters())
    return [*found, *(whole(p.grad) for p in parameters), *(whole(p) for p in parameters)]


def worker(rank: int, port: int, spec: str, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        alone = train(rewrite.optimize(llama(), spec, example_inputs=batch()), ambient=False)
        results = {}
        for name, way in WAYS.items():
            model = way(rewrite.optimize(llama(), spec, example_inputs=batch()))
            results[name] = train(model, ambient=name == "sharded")
        weights = [copy.weight() for copy in weight_casts._copies.values()]
        emptied = [each for each in weights if each is not None and each.untyped_storage().nbytes() == 0]
        assert {each.shape for each in emptied} <= {model.lm_head.weight.shape}, "a copy undoes the sharding"
        torch.save((alone, results), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "spec",
    [
        "mixed-precision,checkpoint",
        pytest.param("mixed-precision{level=O2,dtype=bf16}", marks=pytest.mark.sweep),
        pytest.param("checkpoint,mixed-precision{level=O2,dtype=bf16}", marks=pytest.mark.sweep),
    ],
)
def test_gradients_are_those_of_the_same_model_alone(spec: str, tmp_path: Path) -> None:
    """pytorch/pytorch#148831: FSDP2 loses autocast in the recompute."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes.spawn(worker, (port, spec, str(tmp_path)), nprocs=WORLD)
    for rank in range(WORLD):
        alone, results = torch.load(tmp_path / f"{rank}.pt")
        assert len({loss.item() for loss in alone[:STEPS]}) == STEPS
        for name, found in results.items():
            for one, other in zip(alone, found, strict=True):
                assert (one - other).norm() <= 1e-5 * one.norm(), name
