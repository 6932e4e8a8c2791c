"""What chunking saves and costs: `python -m tests.bench.chunking [repetitions]`.

The small GPT, and four stacked feed-forward parts, with the pipelines below. Peak and saved bytes by the allocator's
account, above parameters and batch, gradients included; process time on one thread, pairs of steps of eager and
rewritten in turn, the median of their ratios. A benchmark, not a test: machines are noisy.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

import rewrite
from tests.bench.small_gpt import small_gpt
from tests.bench.step import measure_memory
from tests.bench.workload import Workload

GPT = ("chunk-loss", "chunk-ffn", "chunk-loss,checkpoint", "chunk-ffn,chunk-loss,checkpoint")


class Feeds(nn.Module):
    """Four feed-forward parts in a row, 256-1024-256; returns the mean square of what they give."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
        self.parts = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x).pow(2).mean()


def feeds() -> Workload:
    """On 2 x 2048 tokens."""
    torch.manual_seed(0)
    return Workload(Feeds(), {"x": torch.randn(2, 2048, 256)}, blocks=())


def rewritten(workload: Workload, spec: str) -> Workload:
    """The workload with its model rewritten."""
    workload.run(rewrite.optimize(workload.model, passes=spec, example_inputs=dict(workload.inputs)))
    return workload


def ratio(build: Callable[[], Workload], spec: str, repetitions: int) -> float:
    """Process time of a step beside eager's."""
    eager, other = build(), rewritten(build(), spec)
    for _ in range(2):
        eager.step()
        other.step()
    gc.collect()
    gc.freeze()
    found = []
    for repetition in range(repetitions):
        turn = [_seconds(each) for each in ((eager, other) if repetition % 2 else (other, eager))]
        found.append(turn[1] / turn[0] if repetition % 2 else turn[0] / turn[1])
    gc.unfreeze()
    return statistics.median(found)


def _seconds(workload: Workload) -> float:
    started = time.process_time()
    workload.step()
    return time.process_time() - started


def main() -> None:
    """Print one line for each pipeline."""
    torch.set_num_threads(1)
    repetitions = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    for name, build, specs in (("gpt", small_gpt, GPT), ("feed-forward", feeds, ("chunk-ffn{chunks=8}",))):
        eager = measure_memory(build())
        print(f"{name}: eager peak {eager.peak_bytes:,} bytes, saved {eager.saved_bytes:,}")
        for spec in specs:
            memory = measure_memory(rewritten(build(), spec))
            print(
                f"  {spec}: peak {memory.peak_bytes:,} ({eager.peak_bytes / memory.peak_bytes:.2f}x less), "
                f"saved {memory.saved_bytes:,} ({eager.saved_bytes / memory.saved_bytes:.2f}x less), "
                f"time x{ratio(build, spec, repetitions):.3f}"
            )


if __name__ == "__main__":
    main()
