"""What `rewrite.freeze` freezes, what it says, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import rewrite
from passes import Checkpoint, DetachFrozen
from tests.passes.frozen import batch, bert
from tests.passes.models import tokens
from tests.passes.test_detach_frozen import small_model


def trained(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_embeddings_and_layers_of_a_model_with_a_head() -> None:
    model = bert(4, 0)
    frozen = rewrite.freeze(model, "embeddings", "encoder.layer.[0-1]")
    assert frozen.modules == ("bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1")
    assert trained(model) & set(frozen.parameters) == set()
    assert not any("embeddings" in name or ".layer.0." in name for name in trained(model))
    assert any(".layer.2." in name for name in trained(model))
    names = dict(model.named_parameters())
    assert frozen.gradient_bytes == sum(names[name].nbytes for name in frozen.parameters)


def test_the_same_selectors_for_the_base_model_alone() -> None:
    model = BertModel(bert(4, 0).config)
    frozen = rewrite.freeze(model, "embeddings", "encoder.layer.[0-1]")
    assert frozen.modules == ("embeddings", "encoder.layer.0", "encoder.layer.1")


@pytest.mark.parametrize(
    "selectors", [["embeddings", "encoder.layer.[8-11]"], [["embeddings", "encoder.layer.[8-11]"]]]
)
def test_numbers_of_more_digits_and_lists(selectors: list[str]) -> None:
    model = BertModel(BertConfig(num_hidden_layers=13, hidden_size=4, num_attention_heads=1, intermediate_size=4))
    frozen = rewrite.freeze(model, *selectors)
    assert frozen.modules == ("embeddings", *(f"encoder.layer.{number}" for number in range(8, 12)))


@pytest.mark.parametrize("selector", [3, None, ["embeddings", 3]])
def test_a_selector_is_a_text(selector: Any) -> None:
    model = bert(1, 0)
    with pytest.raises(rewrite.SelectorError, match="a selector is a text, or a list of texts, not "):
        rewrite.freeze(model, "embeddings", selector)
    assert trained(model) == set(dict(model.named_parameters()))


def test_parameters_by_name() -> None:
    model = bert(1, 0)
    frozen = rewrite.freeze(model, "**.weight")
    assert trained(model) == {name for name in dict(model.named_parameters()) if name.endswith("bias")}
    assert len(frozen.parameters) == sum(name.endswith("weight") for name, _ in model.named_parameters())


def test_what_it_saves_is_what_the_optimizer_does_not_hold() -> None:
    model, inputs = bert(2, 0), batch()
    before = rewrite.estimate(model, inputs, optimizer="adamw").by_category
    frozen = rewrite.freeze(model, "embeddings", "encoder.layer.0")
    after = rewrite.estimate(model, inputs, optimizer="adamw").by_category
    assert before["optimizer"] - after["optimizer"] == frozen.state_bytes()
    assert frozen.state_bytes("sgd") == 0
    assert str(frozen) == (
        "froze 28,896 numbers in 21 parameters, which saves 113 KiB of gradients and 226 KiB of AdamW state"
    )


def test_gradients_that_are_there_go() -> None:
    """As an optimizer's step would use them: SGD moved such a weight by its last gradient, AdamW by its moments."""
    model = small_model().requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tokens()).backward()
    before = model.embedding.weight.clone()
    rewrite.freeze(model, "embedding")
    assert model.embedding.weight.grad is None
    optimizer.step()
    assert torch.equal(model.embedding.weight, before)


def test_a_rewritten_model_is_planned_anew() -> None:
    model = small_model().requires_grad_(True)
    small = rewrite.optimize(model, [DetachFrozen(), Checkpoint()], example_inputs=tokens())
    small(tokens()).backward()
    rewrite.freeze(small, "embedding", "layers.[0-1]")
    small.zero_grad()
    small(tokens()).backward()
    assert {name for name, each in small.named_parameters() if each.grad is not None} == trained(small)
    latest = small.forward.rewriting.results[-1]  # type: ignore[union-attr]
    assert any(change.summary.startswith("frozen") for step in latest.steps for change in step.result.changes)


def test_what_is_frozen_already_is_not_counted_again() -> None:
    model = bert(2, 1)
    frozen = rewrite.freeze(model, "embeddings")
    assert frozen.parameters == ()
    assert frozen.gradient_bytes == 0
    assert "bert.embeddings" in frozen.modules


def test_a_tied_weight_is_frozen_under_both_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    assert rewrite.freeze(model, "head").parameters == ("embedding.weight",)
    assert trained(model) == set()


def test_an_unknown_selector_raises_and_freezes_nothing() -> None:
    model = bert(1, 0)
    with pytest.raises(rewrite.SelectorError) as caught:
        rewrite.freeze(model, "embeddings", "encoder.layers.0")
    assert str(caught.value) == (
        "freeze 'encoder.layers.0': it selects no parameter\n"
        "Next: use paths such as bert.embeddings.word_embeddings, bert.encoder.layer.0.attention.output.dense, "
        "classifier, with * for one component and ** for any number"
    )
    assert trained(model) == set(dict(model.named_parameters()))


def test_no_selector_and_no_module_are_errors() -> None:
    with pytest.raises(rewrite.SelectorError, match="no selector is given"):
        rewrite.freeze(bert(1, 0))
    with pytest.raises(rewrite.ModelError, match=r"freeze takes a torch\.nn\.Module, not str"):
        rewrite.freeze("bert", "embeddings")  # type: ignore[arg-type]
    with pytest.raises(rewrite.InputError, match=r"compare rewrite\.estimate before and after"):
        rewrite.freeze(bert(1, 0), "embeddings").state_bytes("adamw8bit")
