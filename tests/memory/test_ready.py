"""A model that was wrapped after it was rewritten is counted as it runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint
from tests.passes.quantized import bert, step, tokens, with_lora


class Wrapper(nn.Module):
    """Scales the loss of the model in it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.calls = 0

    def forward(self, **kwargs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss: torch.Tensor = 0.5 * self.model(**kwargs).loss
        return loss


def test_lora_on_a_rewritten_model_is_counted_before_its_first_step() -> None:
    inputs = tokens(size=8, length=48)
    first = rewrite.optimize(with_lora(bert(), ["query", "value"]), [Checkpoint()], example_inputs=inputs)
    then = with_lora(rewrite.optimize(bert(), [Checkpoint()], example_inputs=inputs), ["query", "value"])
    state = torch.get_rng_state()
    before = rewrite.estimate(then, inputs)

    assert before.saved_bytes == rewrite.estimate(first, inputs).saved_bytes
    assert torch.equal(state, torch.get_rng_state())
    step(then, inputs)
    after = rewrite.estimate(then, inputs)
    assert (after.peak_bytes, after.saved_bytes) == (before.peak_bytes, before.saved_bytes)


def test_any_wrapper() -> None:
    inputs = tokens(size=8, length=48)
    small = rewrite.optimize(bert(), [Checkpoint()])
    wrapped = Wrapper(small)

    assert rewrite.estimate(wrapped, inputs).saved_bytes < 0.5 * rewrite.estimate(Wrapper(bert()), inputs).saved_bytes
    assert wrapped.calls == 0
    assert float(wrapped(**inputs).detach()) > 0


def test_a_wrapper_that_fails_raises_its_own_error() -> None:
    wrapped = Wrapper(rewrite.optimize(bert(), [Checkpoint()]))
    with pytest.raises(AttributeError, match="'str' object has no attribute"):
        rewrite.estimate(wrapped, {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": "nonsense"})
