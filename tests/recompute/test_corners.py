"""Corners in which a recompute once gave wrong numbers, refused what eager trains, or held on to memory."""

from __future__ import annotations

import gc
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rewrite import KEEP, KEEP_STATE, PassResult, Program
from rewrite.capture.randomness import draws
from tests.recompute.models import (
    BATCH,
    LENGTH,
    NOTHING,
    SOME,
    STATES,
    SUBSETS,
    WIDTH,
    Subset,
    assert_same,
    forward,
    hidden,
    left,
    loss_of,
    stacks,
    step,
    tensors,
)
from tests.recompute.test_backwards import both
from tests.recompute.test_bytes import live_bytes


def test_a_backward_after_others_that_asked_for_parts() -> None:
    def run(model: nn.Module) -> list[torch.Tensor]:
        given = hidden()
        loss = forward(model, given)
        found: list[torch.Tensor] = []
        for each in [*model.parameters(), given]:
            found += torch.autograd.grad(loss, each, retain_graph=True)
        loss.backward()
        return [tensors(found), left(model, given.grad)]

    for subset in SUBSETS:
        both(subset, run)


def test_a_backward_after_one_that_was_broken_off() -> None:
    def run(model: Any) -> Any:
        given = hidden()
        loss = forward(model, given)

        def broken(_: torch.Tensor) -> None:
            raise ValueError("broken off")

        handle = model.blocks[0].up.weight.register_hook(broken)
        with pytest.raises(ValueError, match="broken off"):
            loss.backward(retain_graph=True)
        handle.remove()
        model.zero_grad()
        given.grad = None
        loss.backward()
        return left(model, given.grad)

    for subset in SUBSETS:
        both(subset, run)


def view_mul(block: Any, value: torch.Tensor) -> torch.Tensor:
    wide = block.up(value)
    copy = wide.clone()
    copy[:, 1:3].mul_(2.0)
    return torch.tanh(copy) * wide


def item(block: Any, value: torch.Tensor) -> torch.Tensor:
    wide = block.up(value)
    wide[:, 2] = value[:, 3]
    return wide.double().sin().float() * value


def zeros(block: Any, value: torch.Tensor) -> torch.Tensor:
    wide = block.up(value)
    made = torch.zeros_like(wide)
    made[:, ::2] = wide[:, ::2]
    made[:, 1] = 0.3
    return torch.tanh(torch.sin(made)) + value


@pytest.mark.thinned(2)
@pytest.mark.parametrize("body", [view_mul, item, zeros])
@pytest.mark.parametrize("subset", [NOTHING, STATES, SOME], ids=str)
def test_a_value_that_is_written_through_a_view(body: Any, subset: Subset) -> None:
    plain, small = stacks(subset, body)
    assert_same(step(plain, hidden()), step(small, hidden()))


def test_a_generator_of_ones_own_is_drawn_from_once() -> None:
    own = torch.Generator()

    def run(model: nn.Module) -> list[torch.Tensor]:
        own.manual_seed(0)
        given = hidden()
        forward(model, given).backward()
        return [*left(model, given.grad), own.get_state()]

    both(NOTHING, run, body=lambda b, x: x + b.down(torch.sin(b.up(x)) * torch.rand(x.shape, generator=own)))


def test_an_error_in_the_forward_leaves_nothing_behind() -> None:
    def body(block: Any, value: torch.Tensor) -> torch.Tensor:
        inner = torch.sin(block.up(torch.sin(block.up(value))))
        return value + block.table(inner.detach().argmax(-1)) * inner

    _, small = stacks(NOTHING, body, table=lambda: nn.Embedding(WIDTH, WIDTH))
    small.blocks[1].table.weight.data = torch.randn(1, WIDTH)
    for _ in range(3):
        with pytest.raises((IndexError, RuntimeError)):
            forward(small, hidden())
    gc.collect()
    gc.disable()
    before = live_bytes()
    try:
        for _ in range(5):
            with pytest.raises((IndexError, RuntimeError)):
                forward(small, hidden())
        assert live_bytes() == before
    finally:
        gc.enable()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["_scaled_dot_product_flash_attention", "_cudnn_rnn", "miopen_rnn"])
def test_private_kernels_that_may_draw(name: str) -> None:
    assert draws(getattr(torch, name), name, (), {})


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["poisson_nll_loss", "__rand__", "normalize"])
def test_names_that_only_look_random(name: str) -> None:
    assert not draws(getattr(torch.nn.functional, name, torch.Tensor.__rand__), name, (), {})


def test_threads_that_meet_a_new_kind_of_call() -> None:
    _, small = stacks(NOTHING, lambda b, x: x + b.down(torch.sin(b.up(x))))
    small.eval()
    errors: list[Exception] = []

    def work(count: int) -> None:
        try:
            for _ in range(5):
                loss_of(small(hidden(count))).backward()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(count,)) for count in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def recurrent(block: Any, value: torch.Tensor) -> torch.Tensor:
    first, (short, long) = block.one(value)
    second, _ = block.other(first, (short.sin(), long.cos()))
    return block.down(second) + value + (short * long).sum()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("subset", [NOTHING, SOME], ids=str)
def test_a_layer_of_several_results(subset: Subset) -> None:
    plain, small = stacks(
        subset,
        recurrent,
        one=lambda: nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, batch_first=True),
        other=lambda: nn.LSTM(WIDTH, WIDTH, 2, batch_first=True),
    )
    assert_same(step(plain, hidden()), step(small, hidden()))


def test_a_nested_result_of_the_same_shape() -> None:
    def body(block: Any, value: torch.Tensor) -> torch.Tensor:
        result, (short, _) = block.one(value.transpose(0, 1)[:2])
        return value + (short.sin().sum() + result.sum() * 0.1)

    plain, small = stacks(NOTHING, body, one=lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2))
    assert_same(step(plain, hidden()), step(small, hidden()))


def attends(block: Any, value: torch.Tensor) -> torch.Tensor:
    heads = block.up(value).view(BATCH, LENGTH, 2, WIDTH // 2).transpose(1, 2)
    mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
    return value + block.down(mixed.transpose(1, 2).reshape(value.shape))


@dataclass(frozen=True)
class KeepAttention(Subset):
    """Recompute every block but for its attention."""

    name: ClassVar[str] = "keep-attention"

    def apply(self, program: Program) -> PassResult:
        result = super().apply(program)
        for node in (node for region in result.program.regions for node in region.nodes()):
            if "attention" in node.name:
                node.meta[KEEP] = node.meta[KEEP_STATE] = True
        return result


def test_a_product_is_not_run_for_its_input_which_lies_in_a_kept_value() -> None:
    """On a CPU attention's result is laid out so that the reshape after it is a view; captured, it is a copy."""
    plain, small = stacks(KeepAttention(), attends)
    assert_same(step(plain, hidden()), step(small, hidden()))
    loss = forward(small, hidden())
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    ran = counter.get_flop_counts()["Global"]
    product = 2 * BATCH * LENGTH * WIDTH * WIDTH
    assert ran[torch.ops.aten.addmm] == 2 * product  # `up` of both blocks, for attention's backward
