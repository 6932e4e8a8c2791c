"""The levels of MixedPrecision as they are trained with: casts counted, losses scaled, weights held and saved."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import rewrite
from passes import MixedPrecision
from passes.levels import LEVELS
from rewrite import ModelError
from tests.passes.models import Model, tokens
from tests.zoo import ZOO


class Block(nn.Module):
    """A pre-norm block with attention written out."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def split(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        given = self.first_norm(hidden)
        query, key, value = (self.split(each(given)) for each in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        mixed = torch.softmax(scores.float(), -1).to(value.dtype) @ value
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(functional.gelu(self.up(self.second_norm(hidden))))


class Blocks(nn.Module):
    """Four of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Casts(TorchDispatchMode):
    """Counts the casts that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 8, 32, generator=generator) for _ in range(4)]


def distance(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return sum((one - other).detach().norm().item() for one, other in zip(found, exact, strict=True))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_four_blocks_and_four_micro_batches(dtype: str) -> None:
    """Ambient autocast makes 288 casts in these forwards."""
    low = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    model = Blocks()
    small = rewrite.optimize(model, [MixedPrecision(dtype=dtype)], example_inputs=batches()[0])
    exact = [copy.deepcopy(model).double()(batch.double()) for batch in batches()]
    with Casts() as ours:
        found = [small(batch) for batch in batches()]
    ambient = []
    with Casts() as theirs:
        for batch in batches():
            with torch.autocast("cpu", dtype=low):
                ambient.append(model(batch))
    assert ours.count <= 112
    assert theirs.count == 288
    error, other = (distance(each, exact) for each in (found, ambient))
    assert error <= other
    with Casts() as again:
        [small(batch) for batch in batches()]
    assert again.count == 4 * 4 * 4  # of activations alone: no weight has changed


# Loss scaling.


def rewritten(**options: Any) -> nn.Module:
    return rewrite.optimize(Model(1), [MixedPrecision(**options)], example_inputs=tokens())


def take_step(model: nn.Module, scaler: Any, optimizer: Any, *, overflow: bool = False) -> None:
    optimizer.zero_grad()
    scaler.scale(model(tokens())).backward()
    if overflow:
        next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] = float("inf")  # type: ignore[union-attr]
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_the_step_and_lowers_the_scale_and_clean_steps_raise_it(level: str) -> None:
    """huggingface/diffusers#8871, haotian-liu/LLaVA#363: attempting to unscale FP16 gradients."""
    model = rewritten(level=level)
    scaler = rewrite.loss_scaler(model, growth_interval=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    take_step(model, scaler, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    assert scaler.get_scale() == 2.0**16
    take_step(model, scaler, optimizer, overflow=True)
    assert scaler.get_scale() == 2.0**15
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    for _ in range(3):
        take_step(model, scaler, optimizer)
    assert scaler.get_scale() == 2.0**16
    assert not all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    resumed = rewrite.loss_scaler(model, growth_interval=3)
    take_step(model, scaler, optimizer, overflow=True)
    resumed.load_state_dict(scaler.state_dict())
    assert resumed.get_scale() == 2.0**15


def test_a_static_scale_stays_and_still_skips() -> None:
    model = rewritten(loss_scale=128.0)
    scaler = rewrite.loss_scaler(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        take_step(model, scaler, optimizer, overflow=True)
        assert scaler.get_scale() == 128.0
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    take_step(model, scaler, optimizer)
    assert not all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def test_scaled_gradients_accumulate_over_several_losses() -> None:
    model = rewritten()
    scaler = rewrite.loss_scaler(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    expected = rewrite.optimize(Model(1).eval(), [MixedPrecision("O0")], example_inputs=tokens())
    model.eval()
    for seed in (1, 2):
        scaler.scale(model(tokens(3, 7)) * seed).backward()
        (expected(tokens(3, 7)) * seed).backward()
    scaler.unscale_(optimizer)
    for (name, p), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        if other.grad is not None:
            assert (p.grad - other.grad).norm() <= 0.02 * other.grad.norm() + 1e-4, name


def test_levels_without_a_scale_pass_the_loss_through() -> None:
    for options in ({"level": "O0"}, {"level": "O3"}, {"dtype": "bf16"}):
        scaler = rewrite.loss_scaler(rewritten(**options))
        assert not scaler.is_enabled()
        assert scaler.get_scale() == 1.0
    assert rewrite.loss_scaler(rewritten(dtype="bf16", loss_scale="dynamic")).is_enabled()
    with pytest.raises(ModelError, match="it was not made by rewrite"):
        rewrite.loss_scaler(nn.Linear(2, 2))


# Weights, held and saved.


def test_a_model_saved_under_o2_is_fp32_and_loads_anywhere(tmp_path: Path) -> None:
    entry = ZOO["bert"]
    inputs = entry.inputs(2, 8)
    small = rewrite.optimize(entry.build(), [MixedPrecision("O2")], example_inputs=inputs)
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-3)
    small(**inputs).loss.backward()
    optimizer.step()
    small.save_pretrained(tmp_path)
    loaded = type(small).from_pretrained(tmp_path).eval()
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    master = entry.build()
    master.load_state_dict(small.state_dict())
    assert torch.equal(loaded(**inputs).loss, master.eval()(**inputs).loss)


def test_o3_holds_half_and_leaves_the_original_alone(tmp_path: Path) -> None:
    entry = ZOO["t5"]  # three names of one embedding
    model, inputs = entry.build(), entry.inputs(2, 8)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    small = rewrite.optimize(model, [MixedPrecision("O3", dtype="bf16")], example_inputs=inputs)
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    assert len(list(small.parameters())) == len(list(model.parameters()))
    assert small.shared.weight is small.encoder.embed_tokens.weight
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    small(**inputs).loss.backward()
    assert {p.grad.dtype for p in small.parameters() if p.grad is not None} == {torch.bfloat16}
    held = list(small.parameters())
    with rewrite.full_precision(small):
        small.save_pretrained(tmp_path)
    assert all(p is was for p, was in zip(small.parameters(), held, strict=True))
    loaded = type(model).from_pretrained(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded.shared.weight, small.shared.weight.float())


def test_o3_is_as_near_as_half_can_be() -> None:
    entry = ZOO["bert"]
    model, inputs = entry.build(), entry.inputs(2, 8)
    small = rewrite.optimize(model, [MixedPrecision("O3")], example_inputs=inputs)
    certificate = rewrite.verify(model, small, inputs)
    assert certificate.passed
    notes = {row.note for row in certificate.rows if row.kind == "identity"}
    assert notes == {"held in float16"}


def test_roots_of_norms_are_finite_backward_under_o3() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=200
    )
    model, ids = LlamaForCausalLM(config), torch.randint(0, 200, (2, 16))
    small = rewrite.optimize(model, [MixedPrecision("O3")], example_inputs={"input_ids": ids, "labels": ids})
    for each in (model, small):  # the cube of a first norm's root, about 50, does not fit in fp16
        each(input_ids=ids, labels=ids).loss.backward()
    for found, expected in zip(small.parameters(), model.parameters(), strict=True):
        assert (found.grad.float() - expected.grad).norm() <= 0.01 * expected.grad.norm()


def test_o3_takes_inputs_in_single_and_copies_of_it_work() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2))
    images = torch.randn(2, 3, 8, 8)
    small = rewrite.optimize(model, [MixedPrecision("O3", dtype="bf16")], example_inputs=images)
    expected = small.eval()(images)
    assert expected.dtype == torch.bfloat16
    assert torch.equal(copy.deepcopy(small)(images), expected)
    assert torch.equal(pickle.loads(pickle.dumps(small))(images), expected)
    assert torch.equal(small(images.bfloat16()), expected)


def test_o3_in_place_is_undone_when_the_capture_fails() -> None:
    model = Model(1)
    held = list(model.parameters())
    with pytest.raises(rewrite.CaptureError):
        rewrite.optimize(model, [MixedPrecision("O3")], example_inputs=torch.randn(2, 2, 2, 2), inplace=True)
    assert all(p is was for p, was in zip(model.parameters(), held, strict=True))
    small = rewrite.optimize(model, [MixedPrecision("O3")], example_inputs=tokens(), inplace=True)
    assert small is model
    assert {p.dtype for p in model.parameters()} == {torch.float16}


# The table.


def test_the_table_is_apexs() -> None:
    rows = {name: tuple(vars(level).values()) for name, level in LEVELS.items()}
    assert rows == {
        "O0": ("fp32", False, None, False, 1.0),
        "O1": (None, True, None, None, "dynamic"),
        "O2": ("half", False, True, True, "dynamic"),
        "O3": ("half", False, False, False, 1.0),
    }
