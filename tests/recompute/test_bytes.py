"""Recomputed values go: after the forward, after their last use, with the graph."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from rewrite.memory.allocator import allocated_peak_bytes
from tests.recompute.models import (
    EVERYTHING,
    NOTHING,
    SOME,
    STATES,
    VALUES,
    WIDTH,
    Block,
    Stack,
    Subset,
    forward,
    hidden,
    pair,
    stacks,
)  # fmt: skip


def live_bytes() -> int:
    """Bytes of the distinct storages of all tensors that Python knows of."""
    found = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in found}
    return sum(storages.values())


@pytest.mark.parametrize("subset", [NOTHING, SOME, EVERYTHING], ids=str)
def test_graphs_go_without_the_collector(subset: Subset) -> None:
    """Half of them without a backward, some of them half way through one."""
    _, small = stacks(subset)
    gc.collect()
    gc.disable()
    try:
        held = []
        for _ in range(2):
            for count in range(100):
                given = hidden()
                loss = forward(small, given)
                if count % 4 == 1:
                    loss.backward()
                if count % 4 == 2:
                    torch.autograd.grad(loss, small.blocks[1].down.bias, retain_graph=True)
                del loss, given
            small.zero_grad()
            held.append(live_bytes())
        assert held[0] == held[1]
    finally:
        gc.enable()


WIDE = 64


def wide(block: Any, value: torch.Tensor) -> torch.Tensor:
    inner = nn.functional.gelu(block.widen(nn.functional.layer_norm(value, (WIDTH,))))
    return value + block.narrow(nn.functional.dropout(inner, 0.3, block.training))


def widths(subset: Subset) -> nn.Module:
    make = lambda: Block(wide, widen=lambda: nn.Linear(WIDTH, WIDE), narrow=lambda: nn.Linear(WIDE, WIDTH))  # noqa: E731
    return pair(Stack(make, blocks=4), subset, torch.randn(64, 32, WIDTH))[1]


@pytest.mark.parametrize("subset", [STATES, VALUES, EVERYTHING], ids=str)
def test_the_estimate_is_what_the_allocator_hands_out(subset: Subset) -> None:
    """Every value that is held longer than the fakes hold theirs would show."""
    small, given = widths(subset), torch.randn(64, 32, WIDTH)
    estimated = rewrite.estimate(small, (given,)).peak_bytes
    assert allocated_peak_bytes(small, (given,)) == pytest.approx(estimated, rel=0.01)


def test_what_is_kept_is_what_is_held() -> None:
    given = torch.randn(64, 32, WIDTH)
    saved = {subset: rewrite.estimate(widths(subset), (given,)).saved_bytes for subset in (NOTHING, STATES, EVERYTHING)}
    assert saved[NOTHING] < saved[STATES] < saved[EVERYTHING]
    value, mask = 64 * 32 * WIDE * 4, 64 * 32 * WIDE
    assert saved[STATES] - saved[NOTHING] >= 4 * mask - 4 * 8192
    assert saved[STATES] - saved[NOTHING] < 2 * value
