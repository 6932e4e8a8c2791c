"""Class, configuration, signature, output type, hooks' dictionaries: what a reader of the module sees."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers

import rewrite
from passes import Checkpoint
from tests.promises.pairs import names, pair
from tests.zoo import ZOO
from tests.zoo.compare import assert_equal, run

models = names("bert", "plain-branching", sweep=("llama", "t5", "plain-unet"))


@models
def test_class_configuration_and_signature_are_the_models_own(name: str) -> None:
    entry = ZOO[name]
    model = entry.build()
    inputs = entry.inputs(*entry.shapes[0], entry.masks[0])
    small = rewrite.optimize(model, passes=[Checkpoint()], example_inputs=inputs)
    assert small is not model
    assert type(small) is type(model)
    assert inspect.signature(small.forward) == inspect.signature(model.forward)
    assert type(small(**inputs)) is type(model(**inputs))
    assert repr(small) == repr(model)
    if isinstance(model, transformers.PreTrainedModel):
        assert isinstance(small, transformers.PreTrainedModel)
        assert small.config.to_dict() == model.config.to_dict()
        assert small.device == model.device
        assert small.num_parameters() == model.num_parameters()
        assert small.get_input_embeddings().weight is model.get_input_embeddings().weight


@models
def test_every_module_of_the_original_is_there(name: str) -> None:
    both = pair(name)
    ours, theirs = dict(both.plain.named_modules()), dict(both.small.named_modules())
    assert ours.keys() <= theirs.keys()
    assert all(type(theirs[path]) is type(module) for path, module in ours.items())
    assert all(inspect.signature(theirs[path].forward) == inspect.signature(m.forward) for path, m in ours.items())


def test_outputs_can_be_asked_for() -> None:
    both = pair("bert")
    inputs = {**both.inputs, "output_hidden_states": True}
    expected, found = run(both.plain, inputs), run(both.small, inputs)
    assert any("hidden_states" in name for name in expected.outputs)
    assert_equal(expected, found)


def test_in_place_rewrites_the_module_given() -> None:
    entry = ZOO["bert"]
    model, inputs = entry.build(), entry.inputs(*entry.shapes[0], "padded")
    parameters = list(model.parameters())
    small = rewrite.optimize(model, passes=[Checkpoint()], example_inputs=inputs, inplace=True)
    assert small is model
    assert all(a is b for a, b in zip(parameters, small.parameters(), strict=True))
    assert_equal(run(entry.build(), inputs), run(small, inputs))


def test_positional_arguments_and_other_keywords_are_taken() -> None:
    both = pair("bert")
    for module in (both.plain, both.small):
        module.eval()
    ids, mask = both.inputs["input_ids"], both.inputs["attention_mask"]
    assert torch.equal(both.plain(ids, mask).logits, both.small(ids, mask).logits)
    assert isinstance(both.small(ids, mask, return_dict=False), tuple)
    embedded = both.plain.get_input_embeddings()(ids).detach()
    assert torch.equal(both.plain(inputs_embeds=embedded).logits, both.small(inputs_embeds=embedded).logits)


def test_wrong_arguments_raise_what_the_model_raises() -> None:
    plain = pair("plain-branching")
    with pytest.raises(TypeError, match="no_such_argument"):
        plain.small(**plain.inputs, no_such_argument=1)
    both = pair("bert")
    with pytest.raises(ValueError, match="input_ids"):
        both.small()
    assert_equal(run(both.plain, both.inputs), run(both.small, both.inputs))
