"""Which examples count as the same, and which depend on the rest of their batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from passes import DetachFrozen
from passes.prefix_rows import rows_are_independent
from passes.prefix_settings import settings

ROWS = {
    "mean": lambda z: z - z.mean(0),
    "largest": lambda z: z - z.amax(0),
    "first": lambda z: z - z[:1],
    "sum before": lambda z: z.cumsum(0),
    "row before": lambda z: torch.cat([torch.zeros_like(z[:1]), z[:-1]]),
    "half of the row before": lambda z: torch.cat([z[:, :2].roll(1, 0), z[:, 2:]], 1),
    "other half": lambda z: z + z.roll(len(z) // 2, 0),
    "place": lambda z: z + torch.arange(len(z)).unsqueeze(1),
    "size": lambda z: z * len(z),
    "mirrored": lambda z: z + z.flip(0),
    "pairs": lambda z: (z.view(-1, 2, z.shape[1]) - z.view(-1, 2, z.shape[1]).mean(1, keepdim=True)).flatten(0, 1),
}


@pytest.mark.parametrize("size", [2, 3, 4, 8, 9])
@pytest.mark.parametrize("way", ROWS)
def test_rows_that_read_others_are_told(way: str, size: int) -> None:
    z = torch.randn(size, 4, generator=torch.Generator().manual_seed(size))
    if way == "pairs" and size % 2:
        return
    assert not rows_are_independent(lambda z: [ROWS[way](z)], [z], [True], [ROWS[way](z)])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_rows_of_their_own_are_told(size: int) -> None:
    z, shared = torch.randn(size, 3, 4), torch.randn(7, 4)

    def function(z: torch.Tensor, shared: torch.Tensor) -> list[torch.Tensor]:
        return [(z @ shared.T).softmax(-1), z.argmax(-1)]

    assert rows_are_independent(function, [z, shared], [True, False], function(z, shared))


class Around(nn.Module):
    """A frozen part, something between its rows, and a trained head."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.between = between
        self.one, self.two = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4).requires_grad_(False)
        self.head, self.other = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, both: bool = False) -> torch.Tensor:
        one = self.one(x)
        two = self.two(self.between(one))
        return self.head(two) + self.other(one) if both else self.head(two)


def shifted(z: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(z[:1]), z[:-1]])


def cached(model: nn.Module, x: torch.Tensor, cache: str = "memory", **options: Any) -> Any:
    return rewrite.optimize(model, [DetachFrozen(cache=cache, **options)], example_inputs=x)


def test_a_prefix_that_reads_the_row_before_is_not_kept(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = Around(shifted), torch.randn(5, 4)
    small = cached(model, x)
    for rows in (torch.ones(3, 4), x, x[[3, 1, 4, 0, 2]]):  # of the first, all alike, nothing can be seen
        assert torch.equal(small(rows), model(rows))
    told = "the frozen prefix is not cached: its values for an example depend on others in the batch\n"
    assert capsys.readouterr().err == told


def test_what_reads_more_of_the_same_prefix_has_examples_of_its_own() -> None:
    model, x = Around(torch.tanh), torch.randn(5, 4)
    small = cached(model, x)
    small(x)
    for both in (True, False, True):
        torch.testing.assert_close(small(x, both=both), model(x, both=both))


class Attending(nn.Module):
    """A frozen layer of torch that does not print its heads."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.attention = nn.MultiheadAttention(8, heads, batch_first=True).requires_grad_(False)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x)[0])


def test_settings_that_a_layer_does_not_print_are_in_the_key(tmp_path: Path) -> None:
    x = torch.randn(3, 5, 8)
    for heads in (2, 4):
        model = Attending(heads)
        small = cached(model, x, str(tmp_path), eval_mode=True)
        torch.testing.assert_close(small(x), model(x))
    assert len(list(tmp_path.glob("??/*.safetensors"))) == 6


def test_settings_tell_layers_apart_and_are_the_same_in_every_process() -> None:
    def made(**options: Any) -> tuple[str, ...]:
        return tuple(settings(nn.TransformerEncoderLayer(8, 2, 16, **options)))

    found = {made(), made(norm_first=True), made(activation="gelu"), made(batch_first=True)}
    assert len(found) == 4
    assert made() in found
    assert not any(" at 0x" in line for lines in found for line in lines)


def test_heads_that_change_are_noticed() -> None:
    model, x = Attending(2), torch.randn(3, 5, 8)
    small = cached(model, x, eval_mode=True)
    small(x)
    for each in (model, small):
        each.attention.num_heads, each.attention.head_dim = 4, 2
    torch.testing.assert_close(small(x), model(x))
