"""The course of a backward: worked out for an order of tokens that is new, looked up for one that is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rewrite.recompute import course
from tests.recompute.models import BATCH, LENGTH, RELEASED, SOME, SUBSETS, WIDTH, Subset, forward, hidden, stacks


@pytest.fixture
def worked_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the tokens for which something had to be worked out."""
    found: list[int] = []
    before = course.Course._worked_out

    def noted(self: course.Course, ask: course.Ask, index: int) -> course.Ask:
        found.append(index)
        return before(self, ask, index)

    monkeypatch.setattr(course.Course, "_worked_out", noted)
    return found


@pytest.mark.parametrize("subset", SUBSETS, ids=str)
def test_a_second_step_looks_everything_up(subset: Subset, worked_out: list[int]) -> None:
    _, small = stacks(subset)
    forward(small, hidden()).backward()
    first = len(worked_out)
    forward(small, hidden()).backward()
    forward(small, torch.randn(BATCH + 1, LENGTH + 2, WIDTH, requires_grad=True)).backward()
    assert len(worked_out) == first


def test_equal_blocks_share_a_course(worked_out: list[int]) -> None:
    _, small = stacks(SOME)
    forward(small, hidden()).backward()
    assert len(worked_out) == len(set(worked_out))


@pytest.mark.parametrize("subset", [SOME, RELEASED], ids=str)
def test_ever_new_orders_are_right_and_not_all_remembered(
    subset: Subset, worked_out: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for nothing: a token is worked out whenever it is cashed."""
    monkeypatch.setattr(course, "ORDERS", 0)
    plain, small = stacks(subset)
    found: list[list[Any]] = []
    for model in (plain, small):
        loss, weights = forward(model, hidden()), list(model.parameters())
        parts = [torch.autograd.grad(loss, weights[place:], retain_graph=True) for place in range(len(weights))]
        found.append([each for part in parts for each in part])
    assert all(map(torch.equal, *found))
    assert len(worked_out) > len(set(worked_out))
