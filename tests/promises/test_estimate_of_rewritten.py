"""What an estimate says of a rewritten model, for kinds of calls that it has not met."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import rewrite


def bert() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=3, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=50)
    return BertForSequenceClassification(config)


def batch() -> dict[str, Any]:
    return {"input_ids": torch.randint(0, 50, (2, 24)), "labels": torch.tensor([0, 1])}


def test_a_model_that_was_optimized_in_eval_mode_is_estimated_as_it_trains() -> None:
    inputs = batch()
    trained = rewrite.optimize(bert().train(), "checkpoint", example_inputs=inputs)
    loaded = rewrite.optimize(bert().eval(), "checkpoint", example_inputs=inputs)
    expected = rewrite.estimate(trained, inputs)
    assert rewrite.estimate(loaded, inputs).saved_bytes == expected.saved_bytes
    assert rewrite.estimate(loaded.train(), inputs).peak_bytes == expected.peak_bytes
    assert expected.saved_bytes < rewrite.estimate(bert(), inputs).saved_bytes


def test_a_model_optimized_without_inputs_is_estimated_rewritten() -> None:
    inputs = batch()
    lazy = rewrite.optimize(bert().train(), "checkpoint")
    known = rewrite.optimize(bert().train(), "checkpoint", example_inputs=inputs)
    assert rewrite.estimate(lazy, inputs).saved_bytes == rewrite.estimate(known, inputs).saved_bytes


@pytest.mark.thinned(2)
@pytest.mark.parametrize("given", [True, False])
def test_a_forward_wrapped_in_autocast_since_trains_as_the_plain_one(given: bool) -> None:
    """As accelerate's mixed precision does: `model.forward = autocast(model.forward)`."""
    inputs, found = batch(), []
    for rewritten in (False, True):
        model = bert().train()
        if rewritten:
            model = rewrite.optimize(model, "checkpoint", example_inputs=inputs if given else None)
        wrapped = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
        vars(model)["forward"] = wrapped
        torch.manual_seed(3)
        for _ in range(2):
            loss = model(**inputs).loss
            loss.backward()
            assert not torch.is_autocast_enabled("cpu")
        assert vars(model)["forward"] is wrapped
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *found))


def test_a_wrapped_model_tells_what_was_done_to_it() -> None:
    small = rewrite.optimize(bert().train(), "checkpoint", example_inputs=batch())
    told = rewrite.report(small)
    vars(small)["forward"] = torch.autocast("cpu", dtype=torch.bfloat16)(small.forward)
    assert rewrite.report(torch.nn.Sequential(small)).changes == told.changes != ()
