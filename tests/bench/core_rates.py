"""The rates of one core, as `PEAK_RATES["cpu"]` has them: run `OMP_NUM_THREADS=1 python -m tests.bench.core_rates`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

import rewrite

REPETITIONS = 9
SIZES = ((1024, 128), (2048, 256), (512, 768))
"""Rows and width of the activations of a small, a middle and a wide transformer."""
HEADS = ((2, 512, 32), (8, 256, 64), (1, 1024, 64))
"""Batch, length and width of the heads of attention, of which there are four."""


def seconds(run: Callable[[], object]) -> float:
    """The least CPU time of this thread that `run` took."""
    run()
    best = float("inf")
    for _ in range(REPETITIONS):
        started = time.thread_time()
        run()
        best = min(best, time.thread_time() - started)
    return best


def main() -> None:
    torch.set_num_threads(1)
    for rows, width in SIZES:
        narrow, wide = torch.randn(rows, width), torch.randn(rows, 4 * width)
        weight = torch.randn(4 * width, width)
        flops = 2 * rows * width * 4 * width / seconds(partial(functional.linear, narrow, weight))
        moved = {
            "add": 3 * wide.nbytes / seconds(partial(torch.add, wide, wide)),
            "gelu": 2 * wide.nbytes / seconds(partial(functional.gelu, wide)),
            "layer_norm": 2 * wide.nbytes / seconds(partial(functional.layer_norm, wide, wide.shape[1:])),
        }
        draws = wide.numel() / seconds(partial(torch.Tensor.bernoulli_, torch.empty_like(wide), 0.9))
        shown = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in moved.items())
        print(f"{rows}x{width}: linear {flops / 1e9:.0f} GFLOP/s, {shown}, {draws / 1e6:.0f} M draws/s")
    for batch, length, size in HEADS:
        query = torch.randn(batch, 4, length, size)
        flops = 4 * batch * 4 * length * length * size
        for causal in (False, True):
            run = partial(functional.scaled_dot_product_attention, query, query, query, is_causal=causal)
            print(f"{batch}x{length}, heads of {size}, {causal=}: attention {flops / seconds(run) / 1e9:.0f} GFLOP/s")
    small = torch.randn(8)
    print(f"smallest operator: {seconds(partial(torch.add, small, small)) * 1e6:.2f} us")

    for width, chunks in ((16, (2, 32)), (128, (2, 8))):
        print(f"an operator more in a step, width {width}: {beside(width, *chunks) * 1e6:.0f} us")


def beside(width: int, few: int, many: int) -> float:
    """Seconds that each operator adds which more chunks of a feed-forward part of 1024 rows take."""
    part = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    inputs = torch.randn(1, 1024, width, requires_grad=True)
    found = []
    for chunks in (few, many):
        model = rewrite.optimize(part, passes=f"chunk-ffn{{chunks={chunks}}}", example_inputs=inputs)
        calls = sum(each.calls for each in rewrite.estimate(model, inputs).work)
        found.append((seconds(lambda model=model: model(inputs).sum().backward()), calls))
    (quick, fewer), (slow, more) = found
    return (slow - quick) / (more - fewer)


if __name__ == "__main__":
    main()
