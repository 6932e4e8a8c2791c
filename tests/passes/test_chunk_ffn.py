"""ChunkFFN: what it proves, what it refuses, and that gradients are eager's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint, ChunkFFN
from rewrite import PassError, SelectorError
from tests.passes import spans
from tests.passes.spans import BODIES, Part, inputs
from tests.passes.test_chunk_loss import assert_close
from tests.plan.models import Twice


def step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Loss and gradients by name, that of the input included, from a fixed seed."""
    model.zero_grad()
    torch.manual_seed(5)
    given = x.detach().clone().requires_grad_(x.is_floating_point())
    loss = model(given)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads, **({"input": given.grad} if given.grad is not None else {})}


def chunked(model: nn.Module, x: torch.Tensor, chunks: int = 3, *more: rewrite.Pass) -> nn.Module:
    small = rewrite.optimize(model, passes=[ChunkFFN(chunks=chunks), *more], example_inputs=x)
    assert rewrite.report(small).changes, rewrite.report(small).refusals
    return small


@pytest.mark.thinned(12)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_loss_and_gradients_are_eagers(body: Any) -> None:
    model = Part(body)
    for chunks in (3, 8):
        small = chunked(model, inputs(), chunks)
        for rows, length in ((3, 16), (2, 5), (5, 2), (1, 7)):
            x = inputs(rows, length)
            assert_close(step(model, x), step(small, x))


@pytest.mark.thinned(18)
@pytest.mark.parametrize("chunks", [2, 3, 7, 8])
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 3), (2, 1), (4, 9)])
def test_every_count_of_chunks_and_short_batches(chunks: int, rows: int, length: int) -> None:
    model = Part(spans.gated)
    small = chunked(model, inputs(), chunks)
    x = inputs(rows, length)
    assert_close(step(model, x), step(small, x))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_gradients_are_not_multiplied_by_the_chunks(chunks: int) -> None:
    """axolotl-ai-cloud/axolotl#3666, #3116: gradients 2 to 2.5 times as large."""
    model = Part(spans.plain)
    expected, found = step(model, inputs()), step(chunked(model, inputs(), chunks), inputs())
    for name, value in expected.items():
        assert found[name].norm() / value.norm() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("body", [spans.gated, spans.transposed_layers])
def test_half_precision_is_as_near_the_truth_as_eager(dtype: torch.dtype, body: Any) -> None:
    model = Part(body).to(dtype)
    x = inputs(4, 64).to(dtype)
    truth = step(copy.deepcopy(model).double(), x.double())
    eager, found = step(model, x), step(chunked(model, x, 8), x)
    for name, exact in truth.items():
        missed = (eager[name].double() - exact).norm()
        rounding = torch.finfo(dtype).eps * exact.norm()
        assert (found[name].double() - exact).norm() <= 2 * missed + rounding, name


@pytest.mark.thinned(4)
@pytest.mark.parametrize("body", [spans.normed, spans.gated, spans.transposed_layers])
def test_under_autocast(body: Any) -> None:
    model = Part(body)
    with torch.autocast("cpu", torch.bfloat16):
        small = chunked(model, inputs(), 4)
        eager, found = step(model, inputs()), step(small, inputs())
    assert_close(eager, found, 4 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("frozen", ["up", "down", "up,down", "first", "first,up,down"])
def test_frozen_parts_get_no_gradient(frozen: str) -> None:
    model = Part(spans.plain)
    for name in frozen.split(","):
        model.get_submodule(name).requires_grad_(False)
    small = chunked(model, inputs())
    assert_close(step(model, inputs()), step(small, inputs()))


def test_an_input_without_gradient_still_trains_the_weights() -> None:
    model = Part(spans.plain)
    model.first.requires_grad_(False)
    small = chunked(model, inputs())
    small(inputs()).backward()
    assert small.up.weight.grad is not None
    assert small.down.weight.grad.abs().sum() > 0


def test_several_backwards_accumulation_chosen_gradients_and_hooks() -> None:
    model = Part(spans.gated)
    small = chunked(model, inputs())
    results = []
    for each in (model, small):
        each.zero_grad()
        seen: list[int] = []
        handle = each.up.weight.register_hook(lambda grad, seen=seen: seen.append(1))
        loss = each(inputs())
        chosen = torch.autograd.grad(loss, [each.up.weight, each.down.weight], retain_graph=True)
        assert each.up.weight.grad is None
        loss.backward(retain_graph=True)
        loss.backward()
        each(inputs(2)).backward()
        handle.remove()
        assert len(seen) == 4
        grads = {name: p.grad.clone() for name, p in each.named_parameters() if p.grad is not None}
        results.append({**grads, "chosen up": chosen[0], "chosen down": chosen[1]})
    assert_close(*results)


def test_nested_in_recomputed_blocks() -> None:
    model = Layers()
    x = inputs()
    small = chunked(model, x, 4, Checkpoint())
    assert_close(step(model, x), step(small, x))
    alone = rewrite.optimize(model, passes=[Checkpoint()], example_inputs=x)
    x = inputs(4, 256)
    assert rewrite.estimate(small, x).peak_bytes < 0.7 * rewrite.estimate(alone, x).peak_bytes


class Layers(nn.Module):
    """Four blocks, each a norm and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def test_saved_bytes_fall() -> None:
    model, x = Layers(), inputs(2, 256)
    before, after = (rewrite.estimate(each, x) for each in (model, chunked(model, x, 8)))
    assert before.saved_bytes > 3.8 * after.saved_bytes
    assert before.peak_bytes > 2 * after.peak_bytes


def test_eval_and_no_grad() -> None:
    model = Part(spans.plain).eval()
    small = chunked(model, inputs())
    with torch.no_grad():
        assert torch.allclose(model(inputs()), small(inputs()), rtol=1e-6)


def test_blocks_of_a_kind_share_one_change_and_select_takes_some() -> None:
    model = Layers()
    told = rewrite.report(chunked(model, inputs()))
    taken = [path for change in told.changes for path in change.instances]
    assert taken == [f"blocks.{index}" for index in range(4)]
    assert len(told.changes) == 2  # the first is given an input that needs no gradient
    some = rewrite.optimize(model, passes=[ChunkFFN(chunks=2, select="blocks.[01]")], example_inputs=inputs())
    assert [change.instances for change in rewrite.report(some).changes] == [("blocks.0",), ("blocks.1",)]
    assert_close(step(model, inputs()), step(some, inputs()))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("select", [None, "layers.*"])
def test_a_block_called_in_two_ways_is_chunked_in_both(select: str | None) -> None:
    model = Twice()
    for layer in model.layers:
        layer.mlp[2] = nn.Identity()  # in the place of a dropout, which must not be cut
    x = torch.randn(4, 48, 32)

    small = rewrite.optimize(model, [ChunkFFN(chunks=3, select=select)], example_inputs=x)

    taken = [path for change in rewrite.report(small).changes for path in change.instances]
    assert sorted(taken) == ["layers.0", "layers.0", "layers.1"]
    assert_close(step(model, x), step(small, x))


def test_copies_and_pickles_still_train() -> None:
    model = Layers()
    small = chunked(model, inputs())
    expected = step(model, inputs())
    assert_close(expected, step(copy.deepcopy(small), inputs()))
    assert_close(expected, step(pickle.loads(pickle.dumps(small)), inputs()))


# What is refused.


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("body", "told"),
    [
        (spans.with_batch_norm, "takes its statistics over all positions"),
        (spans.with_attention, "attends from each position to others"),
        (spans.with_cumsum, "sums over the positions before"),
        (spans.with_convolution, "is a convolution, which sees neighbouring positions"),
        (spans.with_routing, "collects positions, and which depends on all of them"),
        (spans.with_dropout, "draws random numbers in the order of positions"),
        (spans.with_norm_over_positions, "works along another dimension than the last"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_mixes_positions_is_refused(body: Any, told: str) -> None:
    small = rewrite.optimize(Part(body), passes=[ChunkFFN(chunks=2)], example_inputs=inputs())
    report = rewrite.report(small)
    assert not report.changes
    ((path, reason),) = [(refusal.path, refusal.reason) for refusal in report.refusals]
    assert path == "down"
    assert f" {told}, so the span cannot be cut before Linear 'down' (spans.py:" in reason


def test_a_narrow_inside_saves_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 8))
    report = rewrite.report(rewrite.optimize(model, passes=[ChunkFFN(chunks=2)], example_inputs=inputs()))
    assert [refusal.reason for refusal in report.refusals] == [
        "the inside of the span takes 1,728 bytes as it is; in 2 chunks its entry and one chunk would take 2,400, "
        "which saves nothing"
    ]


def test_a_model_without_such_parts() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    report = rewrite.report(rewrite.optimize(model, passes=[ChunkFFN()], example_inputs=inputs()))
    assert [refusal.reason for refusal in report.refusals] == [
        "no part of the model makes each position wide and narrow again by itself"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": 0}, "chunk-ffn{chunks=0}: chunks is a whole number from 1\nNext: leave it out to have it chosen"),
        ({"dim": -1}, "chunk-ffn{dim=-1}: dim is a whole number from 0\nNext: use 1 for the sequence"),
    ],
)
def test_options_that_do_not_fit_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PassError) as caught:
        ChunkFFN(**options)
    assert str(caught.value) == message


def test_a_selector_that_matches_nothing() -> None:
    with pytest.raises(SelectorError, match=r"chunk-ffn\{select=layers\.\*\}: it matches no module"):
        rewrite.optimize(Layers(), passes=[ChunkFFN(select="layers.*")], example_inputs=inputs())


def test_it_offers_counts_that_fit() -> None:
    model = Layers()
    offers = ChunkFFN().offers(rewrite.capture(model, inputs(4, 256)))
    assert [offer.chunks for offer in offers] == [8, 16, 32]  # type: ignore[attr-defined]
    assert ChunkFFN().offers(rewrite.capture(nn.Linear(8, 8), inputs())) == []
