"""Recompute as stock PyTorch and transformers offer it, applied as a person would by hand."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.bench.workload import UnavailableError, Workload

aten = torch.ops.aten
LINEAR = [aten.mm.default, aten.addmm.default]
ATTENTION = [aten._scaled_dot_product_flash_attention_for_cpu.default]
MATMUL = [*LINEAR, *ATTENTION, aten.bmm.default, aten.baddbmm.default, aten.convolution.default]


def transformers_checkpointing(workload: Workload, _: str) -> None:
    """`model.gradient_checkpointing_enable()`."""
    enable = getattr(workload.model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise UnavailableError("not a model of transformers")
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def block_checkpointing(workload: Workload, _: str) -> None:
    """`torch.utils.checkpoint.checkpoint` around each block."""
    for block in workload.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def sequential_checkpointing(workload: Workload, segments: str) -> None:
    """`checkpoint_sequential` over all blocks, at the square root of their number of segments by default."""
    if not workload.chained:
        raise UnavailableError("its blocks hand on more than one tensor, which checkpoint_sequential cannot")
    forwards = [block.forward for block in workload.blocks]
    count = int(segments) if segments else round(math.sqrt(len(forwards)))

    def all_blocks(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        chain = [lambda x, forward=forward: forward(x, *args, **kwargs) for forward in forwards]
        result = checkpoint_sequential(chain, count, hidden, use_reentrant=False)
        assert isinstance(result, torch.Tensor)
        return result

    first, *others = workload.blocks
    first.forward = all_blocks
    for block in others:
        block.forward = lambda hidden, *args, **kwargs: hidden


def selective_checkpointing(workload: Workload, kept: str) -> None:
    """Checkpoint each block, and keep what its `matmul`s give, its `linear`s, or its `alternate` linears and attention.

    `alternate` is the policy of torchtitan: every second matrix product, and attention.
    """
    contexts = KEPT[kept]
    for block in workload.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def _every_second() -> Any:
    seen = {False: 0, True: 0}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if operator not in LINEAR:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen[context.is_recompute] += 1
        even = seen[context.is_recompute] % 2 == 0
        return CheckpointPolicy.PREFER_RECOMPUTE if even else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


KEPT: dict[str, Callable[[], Any]] = {
    "matmul": functools.partial(create_selective_checkpoint_contexts, MATMUL),
    "linear": functools.partial(create_selective_checkpoint_contexts, LINEAR),
    "alternate": _every_second,
}
