"""Blocks whose forward changes what they hold: a statistic of their own, a counter, a spectral norm, a weight."""

from __future__ import annotations

import unittest
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import rewrite
from passes import Checkpoint, ChunkFFN
from rewrite.errors import BudgetError, InputError, ModelError


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("average", torch.ones(64))
        self.register_buffer("count", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(1) * 2)
        if kind == "spectral norm":
            nn.utils.parametrizations.spectral_norm(self.up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x)
        if self.kind == "average":
            self.average.lerp_(inner.detach().pow(2).mean(0), 0.1)
            inner = inner / self.average.sqrt()
        if self.kind == "counter":
            self.count += 1
            inner = inner * (1 + 1 / self.count)
        if self.kind == "clamped weight":
            with torch.no_grad():
                self.scale.clamp_(0.1, 1.0)
            inner = inner * self.scale
        return x + self.down(functional.gelu(inner))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


KINDS = ["average", "counter", "spectral norm", "clamped weight"]


def batch(size: int = 64) -> torch.Tensor:
    return torch.randn(size, 16, generator=torch.Generator().manual_seed(1))


def two_steps(model: nn.Module, size: int = 64) -> dict[str, Any]:
    for _ in range(2):
        model.zero_grad()
        loss = model(batch(size))
        loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **grads, **{f"buffer {name}": each.clone() for name, each in model.named_buffers()}}


def assert_same(kind: str, small: nn.Module) -> None:
    expected, found = two_steps(Net(kind)), two_steps(small)
    unequal = [name for name, value in expected.items() if value is not None and not torch.equal(value, found[name])]
    assert unequal == []


@pytest.mark.parametrize("policy", ["blocks", "sqrt", "cheap"])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_blocks_train_as_eager(kind: str, policy: Any) -> None:
    assert_same(kind, rewrite.optimize(Net(kind), passes=[Checkpoint(policy)], example_inputs=batch()))


@pytest.mark.parametrize("kind", KINDS)
def test_planned_blocks_train_as_eager(kind: str) -> None:
    before = rewrite.estimate(Net(kind), batch()).peak_bytes
    with pytest.raises(BudgetError) as raised:
        rewrite.optimize(Net(kind), budget=1, allow="exact", example_inputs=batch())
    lowest = raised.value.lowest_bytes
    assert lowest <= before
    for budget in {lowest, (lowest + before) // 2}:
        small = rewrite.optimize(Net(kind), budget=budget, allow="exact", example_inputs=batch())
        assert rewrite.estimate(small, batch()).peak_bytes <= budget
        assert_same(kind, small)


def test_why_a_block_that_changes_its_weight_is_not_recomputed() -> None:
    small = rewrite.optimize(Net("clamped weight"), passes=[Checkpoint()], example_inputs=batch())
    report = rewrite.report(small)
    assert report.changes == ()
    assert report.refusals[0].path == "blocks.0"
    assert report.refusals[0].reason.startswith("its forward changes the parameter 'scale' in place (test_state_in_")


def test_a_spectral_norm_moves_once_and_is_not_chunked() -> None:
    small = rewrite.optimize(Net("spectral norm"), passes=[ChunkFFN(chunks=4)], example_inputs=batch())
    assert not rewrite.report(small).changes
    assert_same("spectral norm", small)


def test_a_larger_batch_than_the_planned_one_runs_with_the_lowest_peak() -> None:
    """The example fits; a call that is captured anew and does not is no reason to end a training."""
    with pytest.raises(BudgetError) as raised:
        rewrite.optimize(Net(""), budget=1, allow="exact", example_inputs=batch())
    small = rewrite.optimize(Net(""), budget=raised.value.lowest_bytes, allow="exact", example_inputs=batch())
    small.blocks[0].up.register_forward_hook(lambda *_: None)  # type: ignore[union-attr, operator]
    with unittest.TestCase().assertLogs("rewrite", "WARNING") as logged:
        found = two_steps(small, 256)
    assert "the lowest peak that recomputing reaches is" in logged.output[0]
    assert "runs all the same, with that peak" in logged.output[0]
    expected = two_steps(Net(""), 256)
    assert [name for name, value in expected.items() if value is not None and not torch.equal(value, found[name])] == []


def test_a_larger_batch_that_runs_by_the_plan_is_warned_of_once() -> None:
    with pytest.raises(BudgetError) as raised:
        rewrite.optimize(Net(""), budget=1, allow="exact", example_inputs=batch())
    for options in ({"budget": 2 * raised.value.lowest_bytes}, {"passes": [Checkpoint(budget=2 * 10**9)]}):
        small = rewrite.optimize(Net(""), example_inputs=batch(), **options)  # type: ignore[arg-type]
        with unittest.TestCase().assertNoLogs("rewrite", "WARNING"):
            two_steps(small, 2)
        with unittest.TestCase().assertLogs("rewrite", "WARNING") as logged:
            two_steps(small, 256)
        (said,) = logged.output
        assert "runs by a plan made for" in said
        assert "give it as example_inputs" in said
        with unittest.TestCase().assertNoLogs("rewrite", "WARNING"), torch.no_grad():
            small(batch(512))


@pytest.mark.parametrize("budget", [1.5, float("inf"), [1], None.__class__])
def test_a_budget_that_is_no_size(budget: Any) -> None:
    with pytest.raises(InputError, match="is no number of bytes"):
        rewrite.optimize(Net(""), budget=budget, example_inputs=batch())


def test_what_torch_compile_returned_is_refused() -> None:
    for function in (rewrite.optimize, rewrite.capture):
        with pytest.raises(ModelError, match=r"torch\.compile returned"):
            function(torch.compile(Net("")), example_inputs=batch())


def test_one_pass_alone_is_a_pipeline() -> None:
    small = rewrite.optimize(Net(""), Checkpoint(), example_inputs=batch())
    assert rewrite.report(small).changes


def test_a_report_is_of_the_capture_for_which_passes_were_chosen() -> None:
    with pytest.raises(BudgetError) as raised:
        rewrite.optimize(Net(""), budget=1, allow="exact", example_inputs=batch())
    model = Net("").eval()
    small = rewrite.optimize(model, budget=raised.value.lowest_bytes, allow="exact", example_inputs=batch())
    assert str(rewrite.report(small)) == "no pass has run"
    two_steps(small.train())
    assert str(rewrite.report(small)).startswith("checkpoint{budget=")
    assert rewrite.report(small).changes


def test_a_report_says_that_nothing_is_captured_yet() -> None:
    assert str(rewrite.report(rewrite.optimize(Net(""), budget="8GiB"))) == "nothing is captured yet: the first call is"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"optimizer": "adamW"}, r"optimizer 'adamW': it is not known\nNext: choose one of: adamw, "),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "an optimizer of type SGD: a step is counted"),
        ({"device": "gpu"}, r"device 'gpu': memory can be planned for cpu or cuda\nNext: give one of them"),
    ],
)
def test_what_a_step_cannot_be_counted_with_is_refused_without_a_budget_too(options: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        rewrite.optimize(Net(""), "checkpoint", example_inputs=batch(), **options)
