"""Bytes and operations of a step, against a count by hand and against the allocator meter of the package."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rewrite.memory.allocator import allocated_rise_bytes
from tests.bench import account
from tests.bench.flops import step_flops
from tests.bench.methods import changes
from tests.bench.models import entry
from tests.bench.step import compare, eager_state, measure, measure_memory, relative_error
from tests.bench.workload import Workload

TINY = entry("tiny-gpt")
LAYERS, WIDTH, LENGTH, TOKENS, VOCABULARY = 4, 32, 64, 128, 512


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).pow(2).mean()


def test_bytes_are_those_counted_by_hand() -> None:
    workload = Workload(Square(), {"x": torch.randn(32, 64)}, blocks=[])
    workload.step()
    product, weight, scalar = 4 * 32 * 64, 4 * 64 * 64, 4

    memory = measure_memory(workload)

    assert memory.resident_bytes == product + weight  # the batch is as large as the product
    assert memory.gradient_bytes == weight
    assert memory.saved_bytes == product + scalar
    assert memory.peak_bytes >= memory.saved_bytes + product
    assert memory.peak_bytes <= 4 * product + weight + 1024


def test_a_gradient_is_none_of_the_activations() -> None:
    weight = nn.Parameter(torch.randn(1000))
    loss, events = account.watched(lambda: (weight * 2).sum())
    _, backward = account.watched(loss.backward)
    assert weight.grad is not None

    others = account.without([*events, *backward], [weight.grad])

    assert account.level_bytes([*events, *backward]) - account.level_bytes(others) == 4000


def test_the_peak_is_that_of_the_allocator_meter() -> None:
    workload = TINY.build()
    workload.step()
    workload.model.zero_grad(set_to_none=True)
    expected = allocated_rise_bytes(workload.step)

    assert measure_memory(workload).peak_bytes == pytest.approx(expected, rel=0.001)


def test_operations_are_those_of_the_formulas() -> None:
    linear = 2 * TOKENS * WIDTH * WIDTH * (3 + 1 + 4 + 4)
    attention = 2 * 2 * TOKENS * LENGTH * WIDTH
    head = 2 * TOKENS * WIDTH * VOCABULARY
    down = 2 * TOKENS * WIDTH * WIDTH * 4
    recomputed = linear - down + attention  # a checkpoint stops at the last value that is asked for

    assert step_flops(TINY.build().step) == LAYERS * (3 * linear + 3.5 * attention) + 3 * head
    assert step_flops(under("blocks").step) - step_flops(TINY.build().step) == LAYERS * recomputed


@pytest.mark.sweep
def test_operations_inside_compiled_code_are_counted() -> None:
    least_time, least_bytes = measure(TINY, "compile@1"), measure(TINY, "compile@0")

    assert least_time.flops == step_flops(TINY.build().step)
    assert least_bytes.flops > least_time.flops
    assert least_bytes.memory.saved_bytes < least_time.memory.saved_bytes
    assert least_bytes.preparation_seconds > 0


def test_everything_about_a_method_is_measured() -> None:
    eager, blocks = measure(TINY, "eager"), measure(TINY, "blocks")

    assert eager.numbers.gradient_error == blocks.numbers.gradient_error == 0
    assert blocks.memory.resident_bytes == eager.memory.resident_bytes
    assert blocks.memory.gradient_bytes == eager.memory.gradient_bytes
    assert blocks.memory.peak_bytes < eager.memory.peak_bytes / 2
    assert blocks.memory.saved_bytes < eager.memory.saved_bytes / 3
    assert blocks.flops > eager.flops


def test_a_wrong_gradient_shows() -> None:
    eager, other = eager_state(TINY), eager_state(TINY)
    assert compare(other, eager).gradient_error == 0

    other.gradients["head.weight"][0, 0] += 1

    assert compare(other, eager).gradient_error > 0.01
    del other.gradients["head.weight"]
    assert compare(other, eager).gradient_error == float("inf")


def test_errors_are_relative() -> None:
    zeros, ones = {"a": torch.zeros(4)}, {"a": torch.ones(4)}

    assert relative_error({"a": torch.full((4,), 1.5)}, ones) == 0.5
    assert relative_error(zeros, zeros) == 0
    assert relative_error(ones, zeros) == float("inf")


def under(method: str) -> Workload:
    workload = TINY.build()
    for change in changes(method):
        change(workload)
    return workload
