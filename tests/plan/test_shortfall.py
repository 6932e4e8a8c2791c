"""What is said of a budget that nothing fits."""

from __future__ import annotations

import pytest
import torch

import rewrite
from rewrite import BudgetError
from rewrite.memory.timeline import Estimate
from rewrite.plan.shortfall import too_small
from tests.plan.joint_models import Language, batch


def refusal(budget: int, rows: int, optimizer: str | None = None) -> BudgetError:
    with pytest.raises(BudgetError) as raised:
        rewrite.plan(Language(), budget, batch(rows), optimizer=optimizer)
    return raised.value


def lowest(rows: int, optimizer: str | None = None) -> Estimate:
    return rewrite.estimate(Language(), batch(rows), optimizer=optimizer)


def test_where_the_batch_holds_the_peak_a_smaller_one_is_advised() -> None:
    error = refusal(1000, 32)

    assert " of temporaries" in error.cause or " of values saved for the backward" in error.cause
    assert error.next_step.startswith(f"give at least {error.lowest_bytes} bytes, a smaller batch, a shorter sequence")
    assert error.next_step.endswith("or reduced numerics (allow)")


def test_where_parameters_hold_it_a_smaller_batch_is_not() -> None:
    error = refusal(1000, 1, "adamw")

    assert " of optimizer state" in error.cause
    assert "batch" not in error.next_step
    assert "freeze some" in error.next_step
    assert "adamw8bit" in error.next_step


class Table(torch.nn.Module):
    """A layer, and much beside it that no gradient is made for."""

    def __init__(self, *, trained: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        table = torch.zeros(4096, 64)
        if trained:
            self.table: torch.Tensor = torch.nn.Parameter(table, requires_grad=False)
        else:
            self.register_buffer("table", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.table[:8, :8]).sum()


@pytest.mark.parametrize(
    ("trained", "told"), [(True, "frozen weights in fewer bits (quantize-frozen)"), (False, "a smaller model")]
)
def test_where_nothing_in_training_holds_it_freezing_is_not_advised(trained: bool, told: str) -> None:
    step = rewrite.estimate(Table(trained=trained), torch.zeros(8, 8))
    assert too_small(1000, step, ways=()).next_step == f"give at least {step.peak_bytes} bytes, {told}"


def test_storages_alike_are_counted_and_none_is_without_a_name() -> None:
    for rows, optimizer in ((32, None), (1, "adamw")):
        told = too_small(1000, lowest(rows, optimizer)).cause.partition("; the largest there: ")[2].split(", ")
        assert 1 <= len(told) <= 3
        assert len(set(told)) == len(told)
        assert all(" of " in each and not each.endswith(" of  (optimizer)") for each in told)


def test_sizes_that_read_alike_are_told_in_bytes() -> None:
    step = lowest(1)
    assert too_small(step.peak_bytes - 1, step).subject == (
        f"budget {rewrite.size_text(step.peak_bytes)} ({step.peak_bytes - 1} bytes)"
    )
    assert too_small(10, step).subject == "budget 10 B"
