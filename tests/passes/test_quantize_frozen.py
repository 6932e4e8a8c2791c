"""Frozen weights in few bits: the model is the one with those weights, whatever passes and adapters come on top."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

import rewrite
from passes import Checkpoint, ChunkFFN, ChunkLoss, QuantizeFrozen
from rewrite import PassError, SelectorError
from rewrite.tags import STORE
from tests.passes.quantized import (
    assert_same_step,
    bert,
    llama,
    step,
    tokens,
    weight_bytes,
    with_lora,
    with_stored_weights,
)

BITS = pytest.mark.parametrize("bits", [8, 4])
ONE = pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.sweep), 4])
"""What goes the same way for both; the other in the long run of the tests."""
LORA = ["q_proj", "v_proj", "down_proj"]


def quantized(model: nn.Module, *passes: Any, bits: int = 8, **options: Any) -> Any:
    every = type(model).__name__.startswith("Llama")
    return rewrite.optimize(model, [QuantizeFrozen(bits), *passes], example_inputs=tokens(every=every), **options)


@functools.lru_cache(maxsize=2)
def stored(bits: int) -> Any:
    """A quantized model that tests leave as it is."""
    return quantized(bert(), bits=bits)


def layers(model: nn.Module) -> dict[str, nn.Module]:
    return {path: layer for path, layer in model.named_modules() if hasattr(layer, "stored_bits")}


@pytest.mark.thinned(2)
@BITS
def test_frozen_layers_become_those_of_bitsandbytes(bits: int) -> None:
    model = bert()
    small = quantized(model, bits=bits)
    kind = {8: bnb.nn.Linear8bitLt, 4: bnb.nn.Linear4bit}[bits]

    frozen = {path for path, each in model.named_modules() if type(each) is nn.Linear and "encoder" in path}
    assert layers(small).keys() == frozen
    assert all(isinstance(layer, kind) for layer in layers(small).values())
    assert type(small.classifier) is nn.Linear
    assert small.classifier.weight is model.classifier.weight
    assert type(small) is type(model)
    assert [name for name, _ in small.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(type(layer) is not kind for layer in model.modules())


@pytest.mark.thinned(2)
@BITS
def test_bytes_are_those_promised(bits: int) -> None:
    model = bert(width=256)
    small = quantized(model, bits=bits)
    before = weight_bytes(model.bert.encoder, nn.Linear)
    now = weight_bytes(small.bert.encoder, nn.Linear)

    assert now <= {8: 0.27, 4: 0.16}[bits] * before
    (change,) = rewrite.report(small).changes
    assert change.summary == (
        f"12 frozen weights stored in {bits} bits: {rewrite.size_text(before)} -> {rewrite.size_text(now)}"
    )
    assert change.instances == ("bert.encoder.layer.0", "bert.encoder.layer.1")
    region = rewrite.report(small).after.region("bert.encoder.layer.1")
    assert {node.name for node in region.nodes() if node.meta.get(STORE) == bits} == set(change.nodes)


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("bits", "passes", "bound"),
    [
        (8, [], 0.0),
        (4, [], 0.0),
        pytest.param(8, [Checkpoint()], 0.0, marks=pytest.mark.sweep),
        (4, [Checkpoint(policy="cheap")], 0.0),
        pytest.param(8, [ChunkFFN(chunks=2)], 1e-5, marks=pytest.mark.sweep),
        (4, [ChunkFFN(chunks=3), Checkpoint()], 1e-5),
        pytest.param(4, [Checkpoint()], 0.0, marks=pytest.mark.sweep),
        pytest.param(8, [Checkpoint(policy="cheap")], 0.0, marks=pytest.mark.sweep),
        pytest.param(4, [ChunkFFN(chunks=2)], 1e-5, marks=pytest.mark.sweep),
        pytest.param(8, [ChunkFFN(chunks=3), Checkpoint()], 1e-5, marks=pytest.mark.sweep),
    ],
    ids=str,
)
def test_a_step_is_that_of_the_model_with_the_stored_weights(bits: int, passes: list[Any], bound: float) -> None:
    model = bert()
    small = quantized(model, *passes, bits=bits)
    plain = with_stored_weights(model, small)

    grads = assert_same_step(plain, small, tokens(), bound)
    assert_same_step(plain, small, tokens(4, size=2, length=19), bound)
    assert all(bool(grad.abs().max() > 0) for name, grad in grads.items() if "embeddings.word" in name)
    plain.eval(), small.eval()
    assert torch.allclose(plain(**tokens()).logits, small(**tokens()).logits, atol=1e-6 if bound else 0)
    plain.train(), small.train()
    assert_same_step(plain, small, tokens(5), bound)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("bits", "first"),
    [
        (8, "lora"),
        (4, "rewrite"),
        pytest.param(4, "lora", marks=pytest.mark.sweep),
        pytest.param(8, "rewrite", marks=pytest.mark.sweep),
    ],
)
def test_lora_on_top_trains(bits: int, first: str) -> None:
    model = llama()
    passes = [QuantizeFrozen(bits), ChunkLoss(chunks=3), ChunkFFN(chunks=2), Checkpoint()]
    inputs = tokens(every=True)
    if first == "lora":
        wrapped = with_lora(copy.deepcopy(model), LORA)
        small = rewrite.optimize(wrapped, passes, example_inputs=inputs)
        plain = with_stored_weights(wrapped, small)
    else:
        rewritten = rewrite.optimize(model, passes, example_inputs=inputs)
        plain = with_lora(with_stored_weights(model, rewritten), LORA)
        small = with_lora(rewritten, LORA)

    grads = assert_same_step(plain, small, inputs, 2e-5)
    assert len(grads) == 2 * 2 * len(LORA)
    assert all("lora_" in name and bool((grad.abs().amax(dim=-1) > 0).all()) for name, grad in grads.items())

    optimizer = rewrite.optimizer(small, "adamw8bit", lr=1e-2)
    losses = []
    for _ in range(6):
        loss = small(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.sweep
@BITS
def test_lora_gradients_are_near_those_of_the_full_weights(bits: int) -> None:
    model = llama()
    full, small = with_lora(copy.deepcopy(model), LORA), with_lora(quantized(model, bits=bits), LORA)
    full.eval(), small.eval()
    _, expected = step(full, tokens(every=True))
    _, found = step(small, tokens(every=True))

    assert expected.keys() == found.keys()
    for name, grad in expected.items():
        gap = (grad - found[name]).norm() / grad.norm()
        assert 0 < gap < {8: 0.05, 4: 0.5}[bits], name


@ONE
def test_saved_bytes_are_those_of_frozen_layers(bits: int) -> None:
    model, inputs = bert(), tokens(size=8, length=48)
    plain = rewrite.estimate(model, inputs)
    small = rewrite.estimate(quantized(model, bits=bits), inputs)
    dropped = rewrite.estimate(quantized(model, Checkpoint(), bits=bits), inputs)
    reference = rewrite.estimate(rewrite.optimize(model, [Checkpoint()], example_inputs=inputs), inputs)

    assert small.saved_bytes == plain.saved_bytes
    assert dropped.saved_bytes == reference.saved_bytes < 0.4 * plain.saved_bytes
    weights = [each.by_category["parameter"] + each.by_category["buffer"] for each in (plain, small)]
    encoder = weight_bytes(model.bert.encoder, nn.Linear)
    assert weights[0] - weights[1] == encoder - weight_bytes(quantized(model, bits=bits).bert.encoder, nn.Linear)


@pytest.mark.sweep
@BITS
def test_the_estimate_is_what_the_allocator_says(bits: int) -> None:
    from rewrite.memory.allocator import allocated_peak_bytes

    model, inputs = bert(), tokens(size=8, length=48)
    small = quantized(model, Checkpoint(), bits=bits)

    assert rewrite.estimate(small, inputs).peak_bytes == pytest.approx(allocated_peak_bytes(small, inputs), rel=0.01)


@pytest.mark.thinned(2)
@ONE
def test_a_diff_without_weights_tells_bytes_before_and_after(bits: int) -> None:
    from rewrite.report.diff import diff_lines

    model = bert().to("meta")
    told = rewrite.diff(model, f"quantize-frozen{{bits={bits}}}", tokens())
    text = "\n".join(map(str, diff_lines(told, 100)))
    before, after = (each.by_category["parameter"] + each.by_category["buffer"] for each in (told.before, told.after))

    assert f"~store     6 frozen weights, in {bits} bits" in text
    assert f"weights    {rewrite.size_text(before):>10} -> {rewrite.size_text(after):>10}" in text
    assert after < before
    assert told.before.flops == told.after.flops


@pytest.mark.thinned(12)
@BITS
@pytest.mark.parametrize(
    "way",
    [
        "state dict",
        "safetensors",
        "pickle",
        *(pytest.param(way, marks=pytest.mark.sweep) for way in ("assign", "torch.save", "deepcopy")),
    ],
)
def test_saved_and_loaded_it_is_the_same(bits: int, way: str, tmp_path: Path) -> None:
    small = stored(bits)
    expected = step(small, tokens())
    other = bert()
    nn.init.normal_(other.bert.encoder.layer[0].output.dense.weight)
    again: Any = quantized(other, bits=bits)
    if way in ("state dict", "assign"):
        assert not any(again.load_state_dict(small.state_dict(), assign=way == "assign"))
    elif way == "torch.save":
        file = io.BytesIO()
        torch.save(small.state_dict(), file)
        file.seek(0)
        again.load_state_dict(torch.load(file, weights_only=True))
    elif way == "safetensors":
        save_file({name: tensor.contiguous() for name, tensor in small.state_dict().items()}, tmp_path / "model")
        again.load_state_dict(load_file(tmp_path / "model"))
    else:
        again = pickle.loads(pickle.dumps(small)) if way == "pickle" else copy.deepcopy(small)
    found = step(again, tokens())

    assert torch.equal(expected[0], found[0])
    assert all(torch.equal(grad, found[1][name]) for name, grad in expected[1].items())
    assert weight_bytes(again, nn.Linear) == weight_bytes(small, nn.Linear)
    for path, layer in layers(again).items():
        assert type(layer.weight) is type(layers(small)[path].weight)
        assert bits == 8 or layer.weight.quant_state.absmax is layer.absmax


@pytest.mark.thinned(2)
@ONE
def test_the_state_dict_of_the_model_as_it_was_is_quantized_as_it_loads(bits: int) -> None:
    model, other = bert(), bert()
    nn.init.normal_(other.bert.encoder.layer[1].output.dense.weight)
    small, again = quantized(model, bits=bits), quantized(other, bits=bits)
    assert not any(again.load_state_dict(model.state_dict()))

    assert torch.equal(step(small, tokens())[0], step(again, tokens())[0])


@BITS
def test_the_state_dict_has_the_keys_of_bitsandbytes(bits: int) -> None:
    small = stored(bits)
    kind = {8: bnb.nn.Linear8bitLt, 4: bnb.nn.Linear4bit}[bits]
    stock = kind(128, 128, has_fp16_weights=False) if bits == 8 else kind(128, 128, quant_type="nf4",
                                                                         compress_statistics=False)  # fmt: skip
    stock.load_state_dict({"weight": torch.ones(128, 128), "bias": torch.ones(128)})
    stock.to("cpu")

    assert small.bert.encoder.layer[0].output.dense.state_dict().keys() == {*stock.state_dict()}


@BITS
def test_weights_are_those_of_bitsandbytes(bits: int) -> None:
    from passes.quantized_linear import CLASSES

    linear = nn.Linear(192, 96).requires_grad_(False)
    made = CLASSES[bits].of(linear)
    if bits == 4:
        packed, state = bnb.functional.quantize_4bit(linear.weight, blocksize=64, quant_type="nf4")
        expected = bnb.functional.dequantize_4bit(packed, state)
    else:
        rows, scales, _ = bnb.functional.int8_vectorwise_quant(linear.weight.half())
        expected = bnb.functional.int8_vectorwise_dequant(rows, scales)
        assert (made.weight.int() - rows.int()).abs().max() <= 1  # they round to half precision first

    assert torch.allclose(made.dequantized(), expected, atol=0 if bits == 4 else 1e-2 * float(expected.abs().max()))
    step_size = linear.weight.abs().amax(1, keepdim=True) / 127
    bound = step_size / 2 * 1.001 if bits == 8 else 0.16 * linear.weight.abs().max()
    assert ((made.dequantized() - linear.weight).abs() <= bound).all()


@pytest.mark.sweep
@BITS
def test_a_merged_adapter_is_in_the_weight(bits: int) -> None:
    rewritten = quantized(llama(), bits=bits)
    setattr(rewritten, f"is_loaded_in_{bits}bit", True)  # how peft is told that layers are quantized
    small = with_lora(rewritten, LORA)
    small.eval()
    expected = small(**tokens(every=True)).logits
    with pytest.warns(UserWarning, match="rounding errors"):
        merged = small.merge_and_unload()

    assert (merged(**tokens(every=True)).logits - expected).abs().max() < {8: 0.02, 4: 0.2}[bits] * expected.abs().max()


@pytest.mark.sweep
@BITS
def test_low_precision_and_autocast(bits: int) -> None:
    model = bert()
    small = quantized(model, Checkpoint(), bits=bits)
    plain = with_stored_weights(model, small)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (loss, ours), (other, theirs) = step(plain, tokens()), step(small, tokens())
    assert torch.allclose(loss, other, rtol=0.02)
    assert all((grad - theirs[name]).norm() <= 0.05 * grad.norm() for name, grad in ours.items())

    small.to(torch.bfloat16)
    for layer in layers(small).values():
        assert layer.weight.dtype == {8: torch.int8, 4: torch.uint8}[bits]
        assert all(buffer.dtype == torch.float32 for buffer in layer.buffers())
    assert small(**tokens()).loss.dtype == torch.bfloat16


def test_a_bias_may_train() -> None:
    model = bert()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    small = quantized(model, Checkpoint())
    plain = with_stored_weights(model, small)

    grads = assert_same_step(plain, small, tokens(), 1e-6)  # a bias' gradient is summed by another kernel
    assert small.bert.encoder.layer[0].output.dense.bias is model.bert.encoder.layer[0].output.dense.bias
    assert "bert.encoder.layer.1.output.dense.bias" in grads


def test_hooks_of_a_layer_stay() -> None:
    model, calls = bert(), []
    model.bert.encoder.layer[0].output.dense.register_forward_hook(lambda *_: calls.append(1))
    small = quantized(model)
    step(small, tokens())

    assert len(calls) == 1


def test_select_takes_some() -> None:
    small = rewrite.optimize(
        bert(), [QuantizeFrozen(4, select="**.attention"), QuantizeFrozen(8, select="**.output.dense")],
        example_inputs=tokens(),
    )  # fmt: skip
    bits = {path.split("layer.0.")[1]: layer.stored_bits for path, layer in layers(small).items() if "layer.0" in path}

    assert bits == {
        "attention.self.query": 4, "attention.self.key": 4, "attention.self.value": 4, "attention.output.dense": 4,
        "output.dense": 8,
    }  # fmt: skip
    assert [change.summary.split(":")[0] for change in rewrite.report(small).changes] == [
        "8 frozen weights stored in 4 bits", "2 frozen weights stored in 8 bits",
    ]  # fmt: skip


def test_what_trains_is_refused() -> None:
    model = bert()
    small = rewrite.optimize(model, [QuantizeFrozen(select="classifier")], example_inputs=tokens())
    (refusal,) = rewrite.report(small).refusals

    assert refusal.path == "classifier"
    assert refusal.reason == (
        "its weight trains, and a weight in low precision cannot: freeze it, or leave it out of select"
    )
    assert not layers(small)
    nothing = rewrite.optimize(bert().requires_grad_(True), [QuantizeFrozen()], example_inputs=tokens())
    (refusal,) = rewrite.report(nothing).refusals
    assert refusal.reason.startswith("no Linear layer has a frozen weight: freeze some first")


def test_weights_that_others_read_are_left_alone() -> None:
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2,
                      decoder_start_token_id=0, pad_token_id=0)  # fmt: skip
    model = T5ForConditionalGeneration(config).requires_grad_(False)
    model.shared.weight.requires_grad_(True)
    ids = torch.ones(2, 5, dtype=torch.long)
    small = rewrite.optimize(model, [QuantizeFrozen(4)], example_inputs={"input_ids": ids, "labels": ids})
    reasons = {refusal.path: refusal.reason for refusal in rewrite.report(small).refusals}

    assert reasons["decoder.block.0.layer.2.DenseReluDense.wo"] == (
        "the model's author keeps it in float32 (_keep_in_fp32_modules)"
    )
    assert "encoder.block.0.layer.0.SelfAttention.q" in layers(small)
    step(small, {"input_ids": ids, "labels": ids})

    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).requires_grad_(False)
    kept = rewrite.optimize(encoder, [QuantizeFrozen()], example_inputs=(torch.ones(2, 3, 32),))
    reasons = {refusal.path: refusal.reason for refusal in rewrite.report(kept).refusals}
    assert reasons["layers.0.linear1"] == "layers.0 reads its weight itself"
    assert not layers(kept)


def test_a_tied_head_is_left_alone() -> None:
    model = llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    small = quantized(model)
    (refusal,) = rewrite.report(small).refusals

    assert (refusal.path, refusal.reason) == ("lm_head", "its weight is that of model.embed_tokens too")
    assert small.lm_head.weight is small.model.embed_tokens.weight


def test_a_model_that_is_one_layer_is_refused() -> None:
    layer = nn.Linear(4, 4).requires_grad_(False)
    small = rewrite.optimize(layer, [QuantizeFrozen()], example_inputs=(torch.ones(2, 4, requires_grad=True),))

    assert rewrite.report(small).refusals[0].reason == "it is the whole model, in whose place no other can stand"


def test_bad_options_are_told() -> None:
    with pytest.raises(PassError, match=r"quantize-frozen\{bits=2\}: bits is 8 or 4\nNext: give one of them"):
        QuantizeFrozen(2)
    model = bert()
    with pytest.raises(SelectorError, match=r"select=\*\*.mlp\}: it matches no Linear layer of the model\nNext: name"):
        rewrite.optimize(model, [QuantizeFrozen(select="**.mlp")], example_inputs=tokens())
    assert not layers(model)


def test_without_bitsandbytes_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(PassError, match=r"bitsandbytes, which is not installed\nNext: install it: pip install"):
        quantized(bert())


def test_in_place_the_old_weights_are_let_go() -> None:
    model = bert()
    old = weakref.ref(model.bert.encoder.layer[0].output.dense.weight)
    small = quantized(model, inplace=True)
    gc.collect()

    assert small is model
    assert old() is None
    assert len(layers(model)) == 12


def test_an_error_in_place_leaves_the_model_as_it_was() -> None:
    model = bert()
    weight = model.bert.encoder.layer[0].output.dense.weight
    with pytest.raises(rewrite.RewriteError):
        rewrite.optimize(model, [QuantizeFrozen()], example_inputs={"nonsense": 1}, inplace=True)

    assert model.bert.encoder.layer[0].output.dense.weight is weight
    assert not layers(model)
    passes = [QuantizeFrozen(select="**.output"), QuantizeFrozen(4, select="nothing")]
    with pytest.raises(SelectorError):
        rewrite.optimize(model, passes, example_inputs=tokens(), inplace=True)
    assert not layers(model)


@ONE
def test_verify_compares_with_the_stored_weights(bits: int) -> None:
    model = bert()
    small = quantized(model, Checkpoint(), bits=bits)
    certificate = rewrite.verify(model, small, tokens())

    assert certificate.passed
    assert certificate.numerics == "reduced"
    note = "12 modules hold other weights; compared with a model that has these"
    assert next(row for row in certificate.rows if row.name == "weights").note == note
    small.bert.encoder.layer[0].output.dense.bias = nn.Parameter(torch.ones(128), requires_grad=False)
    layers(small)["bert.encoder.layer.1.output.dense"].forward = lambda x: x[..., :128] * 3
    assert not rewrite.verify(model, small, tokens()).passed


@pytest.mark.sweep
def test_a_budget_counts_them() -> None:
    model, inputs = bert(), tokens(size=8, length=48)
    with pytest.raises(rewrite.BudgetError):
        rewrite.optimize(model, budget="4MiB", example_inputs=inputs)
    small = rewrite.optimize(model, "quantize-frozen{bits=4}", budget="4MiB", example_inputs=inputs)

    assert rewrite.estimate(small, inputs).peak_bytes <= 4 * 2**20
    assert len(layers(small)) == 12


def test_a_block_that_is_called_with_a_mask_and_without() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = bert().bert

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> SimpleNamespace:
            one = self.model(input_ids=ids, attention_mask=mask).pooler_output
            return SimpleNamespace(loss=(one * self.model(input_ids=ids).pooler_output).sum())

    ids = tokens()["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    model, inputs = Pair(), {"ids": ids, "mask": mask}
    small = rewrite.optimize(model, [QuantizeFrozen(), Checkpoint()], example_inputs=inputs)

    assert_same_step(with_stored_weights(model, small), small, inputs)
    assert {change.path for change in rewrite.report(small).changes} == {"model.encoder.layer.0"}


def test_frozen_later_it_stays_as_it_is() -> None:
    model = bert()
    small = quantized(model)
    small.classifier.requires_grad_(False)
    small.bert.pooler.requires_grad_(False)
    step(small, tokens())

    assert type(small.classifier) is nn.Linear
    assert type(small.bert.pooler.dense) is nn.Linear
