"""Questions about data are answered from the inputs, or assumed aloud."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rewrite.memory import estimate_step


class Gate(nn.Module):
    """Takes the long path when its input, or what its weights make of it, is positive."""

    def __init__(self, of_weights: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.of_weights = of_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if bool((y if self.of_weights else x).sum() > 0):
            y = torch.exp(torch.tanh(y))
        return y.sum()


def test_a_branch_on_the_inputs_is_taken_as_in_a_real_run() -> None:
    taken = estimate_step(Gate(of_weights=False), torch.ones(4, 64))
    passed = estimate_step(Gate(of_weights=False), -torch.ones(4, 64))

    assert taken.saved_bytes == 2 * 4 * 64 * 4
    assert passed.saved_bytes == 0
    assert not taken.assumptions
    assert not passed.assumptions


def test_a_branch_on_weights_is_assumed_and_said() -> None:
    (sentence,) = estimate_step(Gate(of_weights=True), torch.ones(4, 64)).assumptions

    assert sentence.startswith("the root module (test_questions.py:")
    assert "taken as False" in sentence


@pytest.mark.parametrize(
    "select",
    [
        lambda y, mask: y[mask],
        lambda y, mask: y.masked_select(mask[:, None]),
        lambda y, mask: y[mask.nonzero(as_tuple=True)],
        lambda y, mask: y.repeat_interleave(mask.long(), dim=0),
        lambda y, mask: y[torch.unique(mask.long())],
        lambda y, mask: y[: int(mask.sum())],
    ],
)
def test_sizes_that_depend_on_the_inputs_are_the_real_ones(select) -> None:  # type: ignore[no-untyped-def]
    class Select(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.exp(select(self.linear(x), mask)).sum()

    inputs = (torch.randn(32, 64), torch.arange(32) % 3 == 0)
    predicted, measured = estimate_step(Select(), inputs), estimate_step(Select(), inputs, real=True)

    assert predicted.saved_bytes == measured.saved_bytes
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, abs=2048)
    assert not predicted.assumptions


def test_transformers_is_not_told_that_tensors_are_fake() -> None:
    from transformers.utils import import_utils

    before = import_utils.is_fake_tensor
    seen = []

    class Asks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(import_utils.is_tracing(x))
            return super().forward(x)

    estimate_step(Asks(4, 4), torch.randn(2, 4))

    assert seen == [False]
    assert import_utils.is_fake_tensor is before
