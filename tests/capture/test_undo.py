"""What a forward writes to tensors that are neither parameters nor buffers: not in a capture, and once in a call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint

WIDTH = 4
WRITES: dict[str, Callable[[Any], Any]] = {
    "method": lambda seen: seen.add_(1),
    "operator": lambda seen: seen.__iadd__(1),
    "item": lambda seen: seen.__setitem__(0, seen[0] + 1),
    "out": lambda seen: torch.add(seen, 1, out=seen),
    "norm": lambda seen: nn.functional.batch_norm(
        torch.ones(2, WIDTH).cumsum(0), seen, torch.ones(WIDTH), training=True
    ),
}


class Counting(nn.Module):
    """A block that counts its calls in a tensor of its own, held in one of two ways."""

    def __init__(self, write: Callable[[Any], Any], listed: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.write, self.listed = write, listed
        self.seen, self.several = torch.zeros(WIDTH), [torch.zeros(WIDTH)]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.write(self.several[0] if self.listed else self.seen)
        return value + self.down(torch.tanh(self.up(value)))

    def counted(self) -> list[float]:
        return [*self.seen.tolist(), *self.several[0].tolist()]


@pytest.mark.parametrize("listed", [False, True], ids=["attribute", "list"])
@pytest.mark.parametrize("write", WRITES)
def test_a_capture_writes_nothing_and_a_step_what_the_original_does(write: str, listed: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[Counting(WRITES[write], listed) for _ in range(3)])
    small = copy.deepcopy(plain)
    given = torch.randn(2, WIDTH)
    rewrite.capture(small, (given,))
    small = rewrite.optimize(small, passes=[Checkpoint()], example_inputs=(given,))
    assert [block.counted() for block in small] == [[0.0] * 2 * WIDTH] * 3
    for model in (plain, small):
        model(given).square().sum().backward()
    assert [block.counted() for block in small] == [block.counted() for block in plain]
    for expected, found in zip(plain.parameters(), small.parameters(), strict=True):
        assert expected.grad is not None
        assert torch.equal(expected.grad, found.grad)  # type: ignore[arg-type]
