"""MixedPrecision: which casts there are, counted, in the manner of TensorFlow's auto_mixed_precision tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint, ChunkFFN, ChunkLoss, MixedPrecision
from rewrite import PassError, SelectorError
from rewrite.text import program_text
from tests.passes.models import Model, tokens
from tests.passes.overflow import normal
from tests.plan.models import Twice

CASTS = ("to", "cast_weight")
HALF = (torch.float16, torch.bfloat16)


class Body(nn.Module):
    """Weights to call a function with: `function(module, hidden)`."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = (nn.Parameter(torch.randn(64, 64) / 8) for _ in range(2))
        self.function = [function]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.function[0](self, hidden)


def casts(model: nn.Module) -> list[tuple[str, torch.dtype]]:
    """(what is cast, to which dtype) for each cast in the graphs of a rewritten model."""
    program = rewrite.report(model).after
    assert program is not None
    found = []
    for region in program.regions:
        for node in region.nodes():
            if node.op.startswith("call") and str(getattr(node.target, "__name__", node.target)) in CASTS:
                source = node.args[0]
                if source.meta["val"].is_floating_point():
                    found.append((source.name, node.meta["val"].dtype))
                    assert source.meta["val"].dtype != node.meta["val"].dtype, "a cast that casts nothing"
                    assert getattr(source.target, "__name__", source.target) not in ("to", "cast_weight"), (
                        "cast of a cast"
                    )
    return found


def small(function: Callable[[Any, torch.Tensor], torch.Tensor], **options: Any) -> nn.Module:
    return rewrite.optimize(Body(function), [MixedPrecision(**options)], example_inputs=normal())


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Node name -> dtype of what it gives, of the first graph."""
    program = rewrite.report(model).after
    assert program is not None
    values = ((node.name, node.meta.get("val")) for node in program.regions[0].nodes())
    return {name: value.dtype for name, value in values if isinstance(value, torch.Tensor)}


def test_a_graph_without_products_is_unchanged() -> None:
    model = small(lambda m, x: (x * 2).tanh().softmax(-1))
    assert not rewrite.report(model).changes
    assert "no operator of the model gains" in rewrite.report(model).refusals[0].reason
    assert casts(model) == []


def test_what_is_half_already_is_unchanged() -> None:
    model = Body(lambda m, x: torch.tanh(x @ m.first) @ m.last).half()
    found = rewrite.optimize(model, [MixedPrecision()], example_inputs=normal().half())
    assert not rewrite.report(found).changes
    assert casts(found) == []


def test_a_simple_chain_is_cast_at_its_ends() -> None:
    model = small(lambda m, x: torch.relu(x @ m.first @ m.last))
    assert casts(model) == [
        ("hidden", torch.float16), ("first", torch.float16), ("last", torch.float16), ("relu", torch.float32)
    ]  # fmt: skip
    assert dtypes(model)["matmul"] == dtypes(model)["matmul_1"] == dtypes(model)["relu"] == torch.float16


def test_clear_nodes_take_the_colour_of_their_neighbours_both_ways() -> None:
    model = small(lambda m, x: (x.transpose(0, 1).relu() @ m.first).relu().transpose(0, 1).exp())
    assert casts(model) == [("hidden", torch.float16), ("first", torch.float16), ("transpose_1", torch.float32)]


def test_a_clear_node_that_others_read_in_single_is_not_rounded() -> None:
    model = small(lambda m, x: (lambda turned: (turned @ m.first).float() + turned.exp())(x.relu()))
    assert casts(model)[0] == ("relu", torch.float16)
    assert dtypes(model)["relu"] == torch.float32


def test_infer_between_products_is_low_and_behind_the_last_is_not() -> None:
    model = small(lambda m, x: torch.tanh(torch.tanh(x @ m.first) @ m.last))
    assert dtypes(model)["tanh"] == torch.float16
    assert dtypes(model)["tanh_1"] == torch.float32
    model = small(lambda m, x: torch.tanh(torch.tanh(x @ m.first) @ m.last), level="O2")
    assert dtypes(model)["tanh_1"] == torch.float16


def test_deny_is_carried_forward_to_the_last_that_is_not_clear() -> None:
    """deny -> infer -> clear -> infer -> clear -> allow -> infer."""
    model = small(lambda m, x: torch.tanh(((x @ m.first).exp().tanh().relu().tanh().relu()) @ m.last) @ m.last)
    found = dtypes(model)
    assert [found[name] for name in ("exp", "tanh", "relu", "tanh_1")] == [torch.float32] * 4
    assert [found[name] for name in ("relu_1", "matmul_1", "tanh_2")] == [torch.float16] * 3


def test_an_existing_cast_of_truth_values_is_given_the_new_dtype() -> None:
    model = small(lambda m, x: ((x @ m.first) * (x > 0).to(torch.float32)) @ m.last)
    assert casts(model) == [
        ("hidden", torch.float16), ("first", torch.float16), ("last", torch.float16), ("matmul_1", torch.float32)
    ]  # fmt: skip
    assert dtypes(model)["to"] == torch.float16


def test_casts_to_fp32_that_cast_nothing_go() -> None:
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = (x @ m.first).to(torch.float32)
        return hidden.to(x.dtype) @ m.last

    assert len(casts(small(function))) == 4


def test_float_is_an_island_of_the_authors() -> None:
    model = small(lambda m, x: torch.sigmoid((x @ m.first).float()) @ m.last)
    assert dtypes(model)["sigmoid"] == torch.float32


@pytest.mark.thinned(3)
@pytest.mark.parametrize("norm", [nn.LayerNorm(64), nn.RMSNorm(64), nn.GroupNorm(8, 8), nn.BatchNorm1d(8)])
def test_norms_are_islands(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(64, 64), norm, nn.Linear(64, 64))
    found = rewrite.optimize(model, [MixedPrecision()], example_inputs=normal())
    names = [name for name, _ in casts(found)]
    assert len(names) == 8  # two inputs, two results, two weights and two biases
    assert dtypes(found)["_1"] == torch.float32


def test_a_value_is_cast_once_for_all_that_read_it() -> None:
    model = small(lambda m, x: torch.tanh(x) @ m.first + torch.tanh(x).relu() @ m.last + x @ m.first)
    names = [name for name, _ in casts(model)]
    assert len(names) == len(set(names))


def test_sums_promote_without_a_cast() -> None:
    model = small(lambda m, x: x.exp() + x @ m.first)
    assert casts(model) == [("hidden", torch.float16), ("first", torch.float16)]


def test_residual_sums_stay_in_single_unless_told() -> None:
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ m.first
        hidden = hidden + torch.tanh(hidden @ m.last)
        return hidden @ m.last

    assert dtypes(small(function))["add"] == torch.float32
    assert dtypes(small(function, fp32_residual=False))["add"] == torch.float16


def test_what_is_written_in_place_stays() -> None:
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = x @ m.first
        hidden += 1.0
        before = hidden @ m.last
        hidden.mul_(2.0)
        return before + hidden @ m.last

    model = Body(function)
    found = rewrite.optimize(model, [MixedPrecision()], example_inputs=normal())
    torch.testing.assert_close(found(normal()), model(normal()), rtol=1e-2, atol=1e-2)


def test_an_authors_span_of_autocast_keeps_its_precision() -> None:
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            hidden = x @ m.first
        return hidden @ m.last

    model = small(function)
    assert dtypes(model)["matmul"] == torch.float32
    assert dtypes(model)["matmul_1"] == torch.float16


def test_kept_modules_and_operators() -> None:
    model = Model(2)
    found = rewrite.optimize(model, [MixedPrecision(keep_fp32=("layers.1.mlp", "head"))], example_inputs=tokens())
    program = rewrite.report(found).after
    assert program is not None
    first, second, root = (
        {
            node.name: node.meta["val"].dtype
            for node in program.region(path).nodes()
            if hasattr(node.meta.get("val"), "dtype")
        }
        for path in ("layers.0", "layers.1", "")
    )
    assert first["mlp_0"] == torch.float16
    assert second["mlp_0"] == torch.float32
    assert second["attention_query"] == torch.float16
    assert root["head"] == torch.float32
    one = rewrite.optimize(model, [MixedPrecision(keep_fp32="layers.*.attention.matmul")], example_inputs=tokens())
    program = rewrite.report(one).after
    assert program is not None
    kinds = {node.name: node.meta["val"].dtype for node in program.region("layers.0").nodes() if node.name == "matmul"}
    assert kinds == {"matmul": torch.float32}


def test_all_kept_is_the_original_bit_for_bit() -> None:
    """microsoft/onnxruntime#21345: every node blocked, and still other numbers."""
    model = Model(2).eval()
    found = rewrite.optimize(model, [MixedPrecision(keep_fp32="**")], example_inputs=tokens())
    assert "as keep_fp32 says" in rewrite.report(found).refusals[0].reason
    assert torch.equal(found(tokens()), model(tokens()))
    assert casts(found) == []


def test_level_0_is_the_original_bit_for_bit() -> None:
    model = Model(2).eval()
    found = rewrite.optimize(model, [MixedPrecision("O0")], example_inputs=tokens())
    assert torch.equal(found(tokens()), model(tokens()))
    assert "O0 is fp32" in rewrite.report(found).refusals[0].reason


def test_a_second_one_does_nothing() -> None:
    program = rewrite.capture(Model(2), tokens())
    once = MixedPrecision().apply(program.copy())
    twice = MixedPrecision("O2").apply(once.program.copy())
    assert not twice.modified
    assert program_text(twice.program) == program_text(once.program)
    assert "set already, by mixed-precision" in twice.refusals[0].reason


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"level": "O4"}, "there is no such level\nNext: choose one of O0, O1, O2, O3"),
        ({"level": "01"}, "the letter O, not a zero"),
        ({"dtype": "fp8"}, "there is no such dtype\nNext: choose fp16 or bf16"),
        ({"loss_scale": -1.0}, "a loss scale is a number above 0, or dynamic"),
        ({"loss_scale": "large"}, "a loss scale is a number above 0, or dynamic"),
    ],
)
def test_wrong_options(options: dict[str, Any], told: str) -> None:
    with pytest.raises(PassError, match=told):
        MixedPrecision(**options)


def test_a_selector_that_matches_nothing() -> None:
    with pytest.raises(SelectorError, match="it matches no module, and no operator in one"):
        rewrite.optimize(Model(1), [MixedPrecision(keep_fp32="layers.7")], example_inputs=tokens())


ORDERS = {
    "checkpoint": [Checkpoint()],
    "chunk-ffn": [ChunkFFN(chunks=2)],
    "chunk-loss": [ChunkLoss(chunks=2)],
    "all": [Checkpoint(), ChunkFFN(chunks=2), ChunkLoss(chunks=2)],
}


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(tokens(3, 40))
    (loss * 64).backward()
    return {
        "loss": loss.detach(),
        **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
    }


@pytest.mark.thinned(4)
@pytest.mark.parametrize("with_", ORDERS)
def test_the_order_of_passes_does_not_matter(with_: str) -> None:
    """pytorch/pytorch#47183, #37730: another precision in the recompute."""
    model, others = Model(2), ORDERS[with_]
    alone = step(rewrite.optimize(copy.deepcopy(model), [MixedPrecision()], example_inputs=tokens(3, 40)))
    first = step(rewrite.optimize(copy.deepcopy(model), [MixedPrecision(), *others], example_inputs=tokens(3, 40)))
    last = step(rewrite.optimize(copy.deepcopy(model), [*others, MixedPrecision()], example_inputs=tokens(3, 40)))
    assert first.keys() == last.keys() == alone.keys()
    for name in alone:
        assert torch.equal(first[name], last[name]), name
        if with_ == "checkpoint":
            assert torch.equal(first[name], alone[name]), name
        torch.testing.assert_close(first[name], alone[name], rtol=2e-2, atol=2e-3)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", HALF)
def test_an_outer_autocast_changes_nothing(dtype: torch.dtype) -> None:
    model = Model(2).eval()
    found = rewrite.optimize(model, [MixedPrecision()], example_inputs=tokens())
    expected = found(tokens())
    with torch.autocast("cpu", dtype=dtype):
        inside = found(tokens())
        made = rewrite.optimize(model, [MixedPrecision()], example_inputs=tokens())
        assert torch.equal(made(tokens()), expected)
    assert torch.equal(inside, expected)
    assert len(found.forward.table) == 1  # the call under autocast was of the same kind


def test_a_block_called_in_two_ways_is_cast_in_both() -> None:
    model, hidden = Twice().eval(), torch.randn(4, 48, 32)

    small = rewrite.optimize(model, [MixedPrecision(dtype="bf16")], example_inputs=hidden)

    taken = [path for change in rewrite.report(small).changes for path in change.instances]
    assert sorted(taken) == ["layers.0", "layers.0", "layers.1"]
    assert small(hidden).item() == pytest.approx(model(hidden).item(), rel=0.02)


class Recurrent(nn.Module):
    """A projection, then a layer of torch that computes its products itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(64, 64), layer, nn.Linear(64, 64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.first(hidden)
        if isinstance(self.layer, nn.MultiheadAttention):
            return self.last(self.layer(hidden, hidden, hidden)[0])
        hidden = self.layer(hidden)
        return self.last(hidden[0] if isinstance(hidden, tuple) else hidden)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (nn.LSTM(64, 64, batch_first=True), "nn.LSTM stays in fp32: its recurrence runs in one call"),
        (nn.GRU(64, 64, batch_first=True), "nn.GRU stays in fp32: its recurrence runs in one call"),
        (
            nn.MultiheadAttention(64, 4, batch_first=True),
            "nn.MultiheadAttention stays in fp32: its softmax runs in one",
        ),
        (
            nn.Conv1d(8, 8, 3, padding=1, padding_mode="circular"),
            "nn.Conv1d stays in fp32: it pads with padding_mode=cir",
        ),
        (nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), "stays in fp32: its weight is computed from"),
    ],
)
def test_a_layer_that_no_cast_reaches_is_said(layer: nn.Module, told: str) -> None:
    model = Recurrent(layer)
    found = rewrite.optimize(model, [MixedPrecision()], example_inputs=normal())
    (refusal,) = rewrite.report(found).refusals
    assert refusal.path == "layer"
    assert told in refusal.reason
    assert found(normal()).dtype == torch.float32
    assert rewrite.report(found).changes
    kept = rewrite.optimize(model, [MixedPrecision(keep_fp32="layer")], example_inputs=normal())
    assert not rewrite.report(kept).refusals  # the user knows


def test_a_layer_with_hooks_is_said_to_stay() -> None:
    model = Recurrent(nn.Linear(64, 64))
    model.layer.register_forward_hook(lambda *_: None)
    found = rewrite.optimize(model, [MixedPrecision()], example_inputs=normal())
    assert [each.path for each in rewrite.report(found).refusals] == ["layer"]
    assert "it has hooks" in rewrite.report(found).refusals[0].reason
