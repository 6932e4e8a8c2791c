"""Forwards that are told by what one before them saved: as right as the first, whatever changes between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rewrite.recompute import script
from rewrite.recompute.followed import Followed
from rewrite.recompute.plan import Plan, Step
from rewrite.recompute.segment import Planned
from tests.recompute.models import NOTHING, SOME, WIDTH, Block, Stack, assert_same, hidden, pair, stacks, step


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[Followed]:
    """Those that were told, in order."""
    found: list[Followed] = []
    finish = Followed.finish

    def finished(self: Followed) -> None:
        found.append(self)
        finish(self)

    monkeypatch.setattr(Followed, "finish", finished)
    return found


def test_blocks_alike_are_told_by_the_first_of_them(forwards: list[Followed]) -> None:
    plain, small = stacks(NOTHING)
    for seed in range(3):
        assert_same(step(plain, hidden(), seed=seed), step(small, hidden(), seed=seed))
    assert len(forwards) == 5
    assert not any(each.astray for each in forwards)


def test_each_shape_has_its_own_script_and_some_are_remembered(
    forwards: list[Followed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "KINDS", 2)
    plain, small = stacks(SOME)
    for length in (3, 4, 3, 4, 5, 6, 3):
        given = torch.randn(2, length, WIDTH).requires_grad_()
        assert_same(step(plain, given), step(small, given))
    assert not any(each.astray for each in forwards)
    assert len(forwards) == 7 + 2, "the second block is always told; the first where its shape is remembered"


def test_a_value_of_another_layout_is_of_another_kind(forwards: list[Followed]) -> None:
    plain, small = stacks(NOTHING)
    for given in (torch.randn(4, 6, WIDTH), torch.randn(6, 4, WIDTH).transpose(0, 1)) * 2:
        assert_same(step(plain, given), step(small, given))
    assert not any(each.astray for each in forwards)


def test_what_has_no_address_is_told_anew_each_time(forwards: list[Followed]) -> None:
    plain, small = stacks(NOTHING)
    for _ in range(2):
        given = torch.randn(0, 6, WIDTH).requires_grad_()
        assert_same(step(plain, given), step(small, given))
    assert forwards == []


def routed(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    chosen = block.up(hidden)[..., 0] > 0
    result = hidden.clone()
    result[chosen] = torch.tanh(block.down(hidden[chosen])).sin()
    return result


def test_sizes_that_the_data_decides_are_never_told_by_a_script(forwards: list[Followed]) -> None:
    plain, small = stacks(NOTHING, routed)
    for seed in range(4):
        assert_same(step(plain, hidden(seed)), step(small, hidden(seed)))
    assert forwards == []


class Moody(torch.autograd.Function):
    """A sine that holds for its backward what comes to its mind."""

    moods: list[str]

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, twice: torch.Tensor) -> torch.Tensor:
        mood = ctx.mood = Moody.moods.pop(0) if Moody.moods else "value"
        held = {"value": (value,), "twice": (twice,), "both": (value, twice), "nothing": ()}
        ctx.save_for_backward(*held[mood])
        ctx.given = value.detach().clone() if mood == "nothing" else None
        return value.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved, mood = ctx.saved_tensors, ctx.mood
        value = ctx.given if mood == "nothing" else saved[0] / 2 if mood == "twice" else saved[0]
        return grads[0] * value.cos(), None


def moody(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    value = block.up(hidden)
    return block.down(Moody.apply(value, value * 2) * value).exp()


@pytest.mark.parametrize("mood", ["twice", "both", "nothing"])
@pytest.mark.parametrize("first", ["value", "both"])
def test_an_operator_that_saves_something_else_than_before(mood: str, first: str, forwards: list[Followed]) -> None:
    """Of the same shape and dtype, and as many: only where it lies tells it from what was expected."""
    Moody.moods = []
    plain = Stack(lambda: Block(moody), blocks=3)
    _, small = pair(plain, NOTHING, hidden())
    Moody.moods = []
    expected = step(plain, hidden())
    for moods in ([first] * 3, [first, mood, first], [mood, mood, first]):
        Moody.moods = list(moods)
        assert_same(expected, step(small, hidden()))
    assert sum(each.astray for each in forwards) == (mood != first), "after one that strayed none is told"


class Placed(torch.autograd.Function):
    """The value as it is, at the start of a piece of memory."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        placed = torch.empty(0).set_(memory.untyped_storage(), 0, value.shape, value.stride())
        return placed.copy_(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def test_another_value_where_one_was_that_is_gone() -> None:
    """A value has an address to itself only while it is alive: what is saved is counted at the end of each node."""
    memory = torch.empty(WIDTH)

    def recorded(module: nn.Module, run: Any, value: torch.Tensor) -> tuple[torch.Tensor]:
        doubled = Placed.apply(value * 2, memory)
        run.made(1, doubled)
        mood = Moody.apply(value.detach(), doubled)
        run.made(2, mood)
        run.gone(1)
        more = Placed.apply(value + 1, memory)
        run.made(3, more)
        result = more.sin() + mood
        run.made(4, result)
        return (result,)

    steps = {1: Step(lambda _, value: value * 2, (0,), (True,)), 3: Step(lambda _, value: value + 1, (0,), (True,))}
    others = frozenset((2, 4))
    plan = Plan("", lambda _, value: (value,), recorded, steps, others, others, lambda _: ())
    segment, found = Planned(plan, None), []  # type: ignore[arg-type]
    for mood in ("twice", "twice", "nothing"):
        Moody.moods = [mood]
        value = torch.linspace(0, 3, WIDTH).requires_grad_()
        segment(nn.Module(), value)[0].sum().backward()
        found.append(value.grad)
    assert torch.equal(found[0], (value + 1).cos())
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


def test_what_was_learned_with_other_weights_in_training_is_not_followed() -> None:
    plain, small = stacks(NOTHING)
    for frozen in (False, True, False):
        for model in (plain, small):
            for block in model.blocks:  # type: ignore[union-attr]
                block.up.requires_grad_(not frozen)  # type: ignore[union-attr, operator]
        for seed in range(2):
            assert_same(step(plain, hidden(), seed=seed), step(small, hidden(), seed=seed))


def test_scripts_hold_no_tensors() -> None:
    def tensors(value: Any) -> Iterator[Any]:
        if isinstance(value, (torch.Tensor, nn.Module)):
            yield value
        elif isinstance(value, dict):
            yield from (found for each in value.values() for found in tensors(each))
        elif isinstance(value, (tuple, list, set, frozenset)):
            yield from (found for each in value for found in tensors(each))

    learned: list[Any] = []

    class Noted(script.Learner):
        def learned(self, run: Any, *told: Any) -> None:
            super().learned(run, *told)
            learned.extend(run.plan.scripts.values())

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rewrite.recompute.segment.Learner", Noted)
        _, small = stacks(SOME)
        step(small, hidden())
    assert len(learned) == 1
    assert list(tensors(learned[0][:3])) == []
