"""What is done with language models: generation, adapters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint
from tests.promises.pairs import Pair, names, pair
from tests.zoo import ZOO
from tests.zoo.compare import assert_equal, run

peft = pytest.importorskip("peft")


@pytest.mark.thinned(2)
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@names("llama", sweep=("gpt2", "t5", "gemma2", "mamba", "bart", "mixtral"))
def test_generation_is_the_originals(name: str, sample: bool) -> None:
    both = pair(name)
    tokens = both.inputs["input_ids"][:, :6]
    written = []
    for model in (both.plain, both.small):
        model.eval()
        torch.manual_seed(2)
        written.append(
            model.generate(tokens, max_new_tokens=6, do_sample=sample, attention_mask=torch.ones_like(tokens))
        )
    assert torch.equal(written[0], written[1])
    assert written[0].shape[1] > 1
    for model in (both.plain, both.small):
        model.train()
    assert_equal(run(both.plain, both.inputs), run(both.small, both.inputs))


LORA = {"bert": ["query", "value"], "llama": ["q_proj", "v_proj", "down_proj"]}


def adapted(model: nn.Module, name: str) -> nn.Module:
    """`model` with LoRA adapters on some projections; their B matrices are not zero, so that all gradients count."""
    torch.manual_seed(6)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=LORA[name]))
    with torch.no_grad():
        for path, parameter in wrapped.named_parameters():
            if "lora_B" in path:
                parameter.normal_(std=0.1)
    return wrapped.train()


def assert_trained(both: Pair) -> None:
    expected, found = run(both.plain, both.inputs), run(both.small, both.inputs)
    assert_equal(expected, found)
    adapters = {path: grad for path, grad in found.grads.items() if "lora_B" in path}
    assert adapters
    assert all(grad is not None and grad.abs().sum() > 0 for grad in adapters.values())


@names("bert", sweep=("llama",))
def test_adapters_added_before_the_rewrite(name: str) -> None:
    entry = ZOO[name]
    inputs = entry.inputs(*entry.shapes[0], "padded")
    small = rewrite.optimize(adapted(entry.build(), name), passes=[Checkpoint()], example_inputs=inputs)
    assert_trained(Pair(adapted(entry.build(), name), small, inputs))


@names("bert", sweep=("llama",))
def test_adapters_added_after_the_rewrite(name: str) -> None:
    both = pair(name)
    assert_trained(Pair(adapted(both.plain, name), adapted(both.small, name), both.inputs))


@names("bert", sweep=("llama",))
def test_adapters_merged_after_training(name: str) -> None:
    both = pair(name)
    merged = [adapted(model, name).merge_and_unload().requires_grad_(True) for model in (both.plain, both.small)]
    assert_equal(run(merged[0], both.inputs), run(merged[1], both.inputs))
