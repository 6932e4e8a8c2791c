"""What `QuantizeFrozen` cannot store in few bits stays as it is and is reported; and what float64 does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm
from transformers import GPT2Config, GPT2LMHeadModel

import rewrite
from passes import Checkpoint, QuantizeFrozen

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
BITS = pytest.mark.parametrize("bits", [8, 4])


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 2))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "made_anew", [weight_norm, spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 3)]
)
def test_a_weight_that_a_hook_makes_is_left_alone(made_anew: Callable[[nn.Module], nn.Module]) -> None:
    model, x = layers(), torch.randn(4, 64)
    made_anew(model[0])
    model[0].requires_grad_(False)
    model(x)
    plain = copy.deepcopy(model)
    small = rewrite.optimize(model, [QuantizeFrozen(8)], example_inputs=x, inplace=True)
    plain[2] = copy.deepcopy(small[2].reference())

    (refusal,) = rewrite.report(small).refusals
    assert refusal.path == "0"
    assert refusal.reason.startswith("its weight is made anew at each call (weight_norm, spectral_norm or pruning")
    assert torch.equal(small(x), plain(x))


@BITS
def test_a_model_may_go_to_float64(bits: int) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    small = rewrite.optimize(layers(), [QuantizeFrozen(bits)], example_inputs=x)
    expected, weight = small(x).detach(), small[0].dequantized()
    small.double()

    assert small[0].dequantized(torch.float64).dtype == torch.float64
    assert torch.allclose(small[0].dequantized(torch.float64).float(), weight, atol=1e-7)
    found = small(x.double().requires_grad_())
    assert torch.allclose(found.float(), expected, atol=1e-5)
    found.sum().backward()
    assert small[3].weight.grad.isfinite().all()


@BITS
def test_a_model_in_float64_is_stored(bits: int) -> None:
    model, x = layers().double(), torch.randn(4, 64, dtype=torch.float64)
    small = rewrite.optimize(model, [QuantizeFrozen(bits), Checkpoint()], example_inputs=x)
    plain = copy.deepcopy(model)
    for place in (0, 2):
        plain[place] = copy.deepcopy(small[place].reference())

    assert small[0].stored_bits == bits
    assert torch.equal(small(x), plain(x))
    assert (small[0].dequantized() - model[0].weight).abs().max() < {8: 0.01, 4: 0.2}[bits] * model[
        0
    ].weight.abs().max()
    if bits == 4:
        assert small[0].quant_state.dtype == torch.float32  # what peft hands to the kernels


def test_frozen_layers_of_other_classes_are_named() -> None:
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(config).requires_grad_(False)

    def told() -> dict[str, str]:
        small = rewrite.optimize(model, "quantize-frozen", example_inputs={"input_ids": torch.ones(2, 4).long()})
        return {refusal.path: refusal.reason for refusal in rewrite.report(small).refusals}

    assert told() == {
        "lm_head": "its weight is that of transformer.wte too",
        "transformer.h.0.attn.c_attn": (
            "it is a Conv1D, as are 7 more frozen layers: only torch.nn.Linear is stored in few bits"
        ),
    }
    model.transformer.h.requires_grad_(True)
    assert told().keys() == {"lm_head"}
