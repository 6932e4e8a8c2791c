"""What stands between blocks, or is given to them beside what passes: at the lowest peak there is, all is equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import rewrite
from passes import Checkpoint
from rewrite.errors import BudgetError, ContractError
from rewrite.plan.apply import tag_passing
from rewrite.plan.curve import EACH, ONCE
from rewrite.program import Program
from rewrite.tags import RECOMPUTE
from tests.recompute.models import Subset
from tests.zoo.compare import assert_equal, run

WIDTH, DEPTH = 64, 6

Between = Callable[[Any, torch.Tensor, torch.Tensor, int], torch.Tensor]


class Part(nn.Module):
    """Small inside; adds what it is given beside, and has a buffer that others may change."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, hidden: torch.Tensor, more: torch.Tensor | float = 0.0) -> torch.Tensor:
        inner = nn.functional.dropout(torch.tanh(self.up(hidden)), 0.1, self.training)
        return hidden + self.scale + self.down(inner) + more


class Several(nn.Module):
    """Gives a value beside that nobody reads, and that its own backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> Any:
        weights = torch.softmax(self.up(hidden), -1)
        return hidden + self.down(weights), weights


class Around(nn.Module):
    """Parts in a row, with something between."""

    def __init__(self, between: Between, part: Callable[[], nn.Module] = Part) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.between = between
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(part() for _ in range(DEPTH))
        self.register_buffer("noise", torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        mask = torch.ones(hidden.shape[0], 1, 1)
        for number in range(DEPTH):
            hidden = self.between(self, hidden, mask, number)
        return hidden.pow(2).mean()


def plain(model: Any, hidden: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
    return model.parts[number](hidden, mask)


def mask_written(model: Any, hidden: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
    hidden = model.parts[number](hidden, mask)
    mask.mul_(0.5)
    return hidden


def mask_written_once(model: Any, hidden: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
    hidden = model.parts[number](hidden, mask)
    if number == 0:
        mask.view(-1)[1:].fill_(2.0)
    return hidden


def buffer_moved(model: Any, hidden: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
    hidden = model.parts[number](hidden)
    model.parts[number].scale.add_(0.25)
    return hidden


def noise_drawn(model: Any, hidden: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
    hidden = model.parts[number](hidden, mask)
    mask.uniform_()
    return hidden


def buffer_given(model: Any, hidden: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
    return model.parts[number](hidden, model.noise)


def counted(model: Any, hidden: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
    hidden = model.parts[number](hidden, mask)
    model.noise.add_(0.5)
    return hidden


def buffer_given_and_written(model: Any, hidden: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
    hidden = model.parts[number](hidden, model.noise)
    model.noise.add_(0.5)
    return hidden


def in_place(model: Any, hidden: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
    hidden = model.parts[number](hidden)
    hidden += 0.5
    return hidden


def some_without_gradients(model: Any, hidden: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
    with torch.set_grad_enabled(number > 2):
        return model.parts[number](hidden)


def one_in_half_precision(model: Any, hidden: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=number == 3):
        return model.parts[number](hidden)


def turns_in_half_precision(model: Any, hidden: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
    if number % 2:
        return model.parts[number](hidden)
    with torch.autocast("cpu", torch.bfloat16):
        return model.parts[number](hidden)


def several(model: Any, hidden: torch.Tensor, mask: torch.Tensor, number: int) -> torch.Tensor:
    first, _ = model.parts[number](hidden)
    return first


def floor_of(model: nn.Module, inputs: Any) -> int:
    with pytest.raises(BudgetError) as raised:
        rewrite.optimize(model, [Checkpoint(budget=1)], example_inputs=inputs)
    return raised.value.lowest_bytes


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    "between",
    [
        plain, counted, mask_written, mask_written_once, buffer_moved, noise_drawn, buffer_given,
        buffer_given_and_written, in_place, some_without_gradients, one_in_half_precision,
        turns_in_half_precision,
    ],
)  # fmt: skip
def test_what_stands_between_blocks_keeps_its_place(between: Between) -> None:
    model, hidden = Around(between), torch.randn(16, 24, WIDTH)
    planned = rewrite.optimize(model, [Checkpoint(budget=floor_of(model, hidden))], example_inputs=hidden)

    assert not rewrite.report(planned).opaque
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    for given in (hidden, torch.randn(8, 12, WIDTH)):
        for train in (True, False):
            expected = run(model, {"hidden": given}, train=train)
            assert_equal(expected, run(planned, {"hidden": given}, train=train))


@pytest.mark.parametrize("passing", [ONCE, EACH])
@pytest.mark.parametrize("within", [True, False])
def test_what_a_block_gives_that_nobody_reads(passing: str, within: bool) -> None:
    """With blocks that recompute by themselves, and with blocks whose own values are held around them."""
    model, hidden = Around(several, Several), torch.randn(4, 6, WIDTH)
    small = rewrite.optimize(model, [Careless(passing=passing, within=within)], example_inputs=hidden)

    assert_equal(run(model, {"hidden": hidden}), run(small, {"hidden": hidden}))


def test_blocks_that_are_given_a_cache_run_once() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=2, use_cache=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = transformers.LlamaForCausalLM(config), torch.randint(0, 64, (4, 32))
    inputs = {"input_ids": ids, "labels": ids}
    planned = rewrite.optimize(model, [Checkpoint(budget=floor_of(model, inputs))], example_inputs=inputs)

    assert_equal(run(model, inputs), run(planned, inputs))


@dataclass(frozen=True)
class Careless(Subset):
    """Puts all blocks in one group, whatever stands between."""

    within: bool = True
    """Whether blocks recompute."""

    def _group(self, program: Program) -> None:
        around = program.regions[0]
        for node in (node for region in program.regions[1:] for node in region.nodes() if not self.within):
            node.meta.pop(RECOMPUTE, None)
        tag_passing(around, {node.name: self.passing for node in around.nodes() if node.meta.get("block")})


def test_a_pass_that_groups_blocks_around_a_write_is_told() -> None:
    with pytest.raises(ContractError, match="stands between them, and writes") as raised:
        rewrite.optimize(Around(counted), [Careless(passing=ONCE)], example_inputs=torch.randn(4, 6, WIDTH))

    assert raised.value.next_step == "end the segment before it"
