"""ChunkLoss: what it finds, what it refuses, and that loss and gradients are eager's."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import rewrite
from passes import ChunkLoss
from rewrite import PassError
from tests.passes import heads
from tests.passes.heads import CLASSES, FINISHES, Headed, batch
from tests.zoo import ZOO

CHUNKS = (2, 3, 7, 8)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def chunked(model: nn.Module, inputs: dict[str, torch.Tensor], chunks: int = 3, logits: str = "auto") -> nn.Module:
    small = rewrite.optimize(model, passes=[ChunkLoss(chunks=chunks, logits=logits)], example_inputs=inputs)
    assert rewrite.report(small).changes, rewrite.report(small).refusals
    return small


def step(model: nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loss and gradients by name."""
    model.zero_grad()
    out = model(**inputs)
    loss = out if isinstance(out, torch.Tensor) else out[0]
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def assert_close(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], bound: float = 1e-6) -> None:
    """Each value within `bound` of the expected one, relative, in the L2 norm; NaN where NaN is expected."""
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        other = found[name]
        assert value.dtype == other.dtype
        assert torch.equal(value.isnan(), other.isnan()), name
        gap = (value.double() - other.double()).nan_to_num().norm()
        assert gap <= bound * value.double().nan_to_num().norm(), (name, float(gap))


@pytest.fixture(autouse=True)
def _small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the pass take heads that are too small to gain."""
    monkeypatch.setattr("passes.chunk_loss.full_bytes", lambda head: 1 << 62)


# Numbers.


@pytest.mark.thinned(21)
@pytest.mark.parametrize("finish", FINISHES, ids=lambda finish: finish.__name__)
@pytest.mark.parametrize("chunks", [3, 8])
def test_loss_and_gradients_are_eagers(finish: Any, chunks: int) -> None:
    model = Headed(finish, bias=True)
    ignore_index = -1 if finish is heads.criterion else -100
    small = chunked(model, batch(ignore_index=ignore_index), chunks)
    for rows, length in ((3, 7), (2, 5), (2, 2), (5, 16)):
        inputs = batch(rows, length, ignore_index=ignore_index)
        assert_close(step(model, inputs), step(small, inputs))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_every_count_of_chunks(chunks: int) -> None:
    model = Headed(heads.flat)
    small = chunked(model, batch(), chunks)
    for rows, length in ((3, 7), (2, 16)):
        assert_close(step(model, batch(rows, length)), step(small, batch(rows, length)))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_heads_with_and_without_bias_tied_or_not(bias: bool, tied: bool) -> None:
    model = Headed(heads.flat, bias=bias, tied=tied)
    small = chunked(model, batch())
    assert_close(step(model, batch()), step(small, batch()))


@pytest.mark.thinned(6)
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 2), (1, 7), (2, 1), (4, 1)])
def test_short_batches(rows: int, length: int) -> None:
    """Captured for their own sizes, or for others."""
    model = Headed(heads.flat)
    inputs = batch(rows, length, ignored=0.0)
    assert_close(step(model, inputs), step(chunked(model, inputs, 8), inputs))
    assert_close(step(model, inputs), step(chunked(model, batch(), 8), inputs))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("finish", [heads.flat, heads.smoothed, heads.weighted, heads.weighted_and_smoothed])
def test_a_chunk_and_a_batch_of_ignored_labels(finish: Any) -> None:
    model = Headed(finish)
    small = chunked(model, batch(4, 6), 4)
    inputs = batch(4, 6, ignored=0.0)
    inputs["labels"][1] = -100  # one of four chunks
    assert_close(step(model, inputs), step(small, inputs))
    inputs["labels"][:] = -100
    expected = step(model, inputs)
    assert expected["loss"].isnan()
    assert not expected["head.weight"].isnan().any()
    assert_close(expected, step(small, inputs))


def test_hidden_states_that_are_not_contiguous() -> None:
    def transposed(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model.head(hidden.transpose(0, 1))
        return functional.cross_entropy(logits.reshape(-1, CLASSES), labels.transpose(0, 1).reshape(-1))

    model = Headed(transposed)
    assert_close(step(model, batch()), step(chunked(model, batch()), batch()))


@pytest.mark.thinned(6)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("finish", [heads.shifted, heads.flat, heads.soft_capped, heads.low_rank])
def test_half_precision_is_as_near_the_truth_as_eager(dtype: torch.dtype, finish: Any) -> None:
    model = Headed(finish).to(dtype)
    inputs = batch(4, 64)
    truth = step(copy.deepcopy(model).double(), inputs)
    eager, found = step(model, inputs), step(chunked(model, inputs, 8), inputs)
    for name, exact in truth.items():
        assert found[name].dtype == eager[name].dtype
        missed = (eager[name].double() - exact).norm()
        rounding = torch.finfo(dtype).eps * exact.norm()
        assert (found[name].double() - exact).norm() <= 2 * missed + rounding, name


@pytest.mark.thinned(2)
@pytest.mark.parametrize("finish", [heads.flat, heads.low_rank, heads.learned_scale])
def test_under_autocast(finish: Any) -> None:
    model = Headed(finish, tied=True)
    with torch.autocast("cpu", torch.bfloat16):
        small = chunked(model, batch(4, 32), 4)
        eager, found = step(model, batch(4, 32)), step(small, batch(4, 32))
    assert_close(eager, found, 2 * torch.finfo(torch.bfloat16).eps)


def test_loss_scaling_loses_nothing_in_half_precision() -> None:
    """Unscaled, these gradients are below the smallest number of fp16; a scaled loss has them above."""

    def faint(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return flat_of(model, hidden, labels) * 1e-6

    def flat_of(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model.head(hidden).float().flatten(0, 1), labels.flatten())

    model = Headed(faint).half()
    small = chunked(model, batch())
    for each in (model, small):
        each.zero_grad()
    (model(**batch()) * 2.0**16).backward()
    expected = model.head.weight.grad
    model.zero_grad()
    (small(**batch()) * 2.0**16).backward()
    assert (expected - small.head.weight.grad).norm() < 2e-3 * expected.norm()


# Backwards.


@pytest.mark.thinned(2)
@pytest.mark.parametrize("finish", [heads.flat, heads.by_row, heads.learned_scale])
def test_several_backwards_of_one_graph(finish: Any) -> None:
    model = Headed(finish)
    small = chunked(model, batch())
    expected, found = [], []
    for each, into in ((model, expected), (small, found)):
        each.zero_grad()
        loss = each(**batch())
        loss.backward(retain_graph=True)
        loss.backward(torch.tensor(3.0), retain_graph=True)
        loss.backward()
        into.append({name: p.grad.clone() for name, p in each.named_parameters() if p.grad is not None})
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_close(expected[0], found[0])


def test_gradients_accumulate_over_backwards() -> None:
    model = Headed(heads.flat)
    small = chunked(model, batch())
    results = []
    for each in (model, small):
        each.zero_grad()
        for rows in (2, 3):
            (each(**batch(rows)) / 2).backward()
        results.append({name: p.grad.clone() for name, p in each.named_parameters() if p.grad is not None})
    assert_close(*results)


def test_gradients_of_chosen_parameters_and_hooks_on_weights() -> None:
    model = Headed(heads.flat)
    small = chunked(model, batch())
    seen: list[int] = []
    handle = model.head.weight.register_hook(lambda grad: seen.append(grad.numel()) or grad * 2)
    wanted = [model.head.weight, model.embedding.weight]
    expected = torch.autograd.grad(model(**batch()), wanted)
    found = torch.autograd.grad(small(**batch()), wanted)
    assert len(seen) == 2
    assert model.head.weight.grad is None
    handle.remove()
    assert_close(dict(enumerate(expected)), dict(enumerate(found)))  # type: ignore[arg-type]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("frozen", ["head", "embedding,layer", "embedding,layer,head"])
def test_frozen_parts_get_no_gradient(frozen: str) -> None:
    """In fp64: the gradient of the scale is a sum of terms that cancel, and is rounded as the processor adds them."""
    model = Headed(heads.learned_scale).double()
    for name in frozen.split(","):
        model.get_submodule(name).requires_grad_(False)
    small = chunked(model, batch())
    assert_close(step(model, batch()), step(small, batch()))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    assert_close(step(model, batch()), step(small, batch()))


def test_without_gradients_and_in_eval() -> None:
    model = Headed(heads.flat).eval()
    small = chunked(model, batch())
    with torch.no_grad():
        assert torch.allclose(model(**batch()), small(**batch()), rtol=1e-6)
    with torch.inference_mode():
        assert torch.allclose(model(**batch()), small(**batch()), rtol=1e-6)


def test_higher_order_gradients_are_refused_as_torch_does() -> None:
    small = chunked(Headed(heads.flat), batch())
    (grad,) = torch.autograd.grad(small(**batch()), small.head.weight, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        grad.sum().backward()


def test_buffers_are_handed_over_without_a_copy() -> None:
    """The gradient of the head is the very buffer the forward filled."""
    from passes import chunked_loss

    made: list[int] = []
    original = chunked_loss._Gradients.held
    held = lambda self: [made.append(t.data_ptr()) or t if t is not None else None for t in original(self)]  # noqa: E731
    small = chunked(Headed(heads.flat), batch())
    small.zero_grad()
    try:
        chunked_loss._Gradients.held = held  # type: ignore[method-assign]
        small(**batch()).backward()
    finally:
        chunked_loss._Gradients.held = original  # type: ignore[method-assign]
    assert small.head.weight.grad.data_ptr() in made


# Logits that are an output.


def with_logits(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model.head(hidden).float()
    return functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1)), logits


def test_logits_are_computed_when_they_are_read() -> None:
    model = Headed(with_logits)
    small = chunked(model, batch())
    loss, logits = small(**batch())
    expected = model(**batch())[1]
    assert logits.shape == expected.shape
    assert logits.content.value is None
    assert torch.allclose(logits, expected)
    assert logits.content.value is not None
    loss.backward()
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_logits_kept_are_an_ordinary_tensor() -> None:
    model = Headed(with_logits)
    small = chunked(model, batch(), logits="keep")
    assert type(small(**batch())[1]) is torch.Tensor
    assert torch.equal(small(**batch())[1], model(**batch())[1])
    assert_close(step(model, batch()), step(small, batch()))


def test_logits_dropped_say_so_when_they_are_read() -> None:
    small = chunked(Headed(with_logits), batch(), logits="drop")
    assert rewrite.verify(Headed(with_logits), small, batch()).passed
    loss, logits = small(**batch())
    loss.backward()
    assert logits.shape == (3, 7, CLASSES)
    with pytest.raises(rewrite.DeferredError) as caught:
        logits.sum()
    assert str(caught.value) == (
        "logits: it was dropped, as asked for, and cannot be read\n"
        "Next: leave out logits=drop to have them computed when they are read"
    )


def test_a_loss_of_the_caller_reaches_the_weights_through_the_logits() -> None:
    model = Headed(with_logits)
    small = chunked(model, batch())
    results = []
    for each in (model, small):
        each.zero_grad()
        loss, logits = each(**batch())
        (loss + logits.softmax(-1).pow(2).sum()).backward()
        results.append({name: p.grad.clone() for name, p in each.named_parameters() if p.grad is not None})
    assert_close(*results)


# Heads that are more than one linear map.


def adapted(dropout: float) -> nn.Module:
    config = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=dropout, target_modules=["lm_head", "up_proj"], init_lora_weights=False
    )
    return get_peft_model(llama(), config)


def test_a_head_with_an_adapter() -> None:
    model = adapted(0.0)
    small = rewrite.optimize(model, "chunk-ffn{chunks=4},chunk-loss{chunks=4}", example_inputs=tokens())
    assert [change.summary for change in rewrite.report(small).changes] == [
        "feed-forward in 4 chunks, each again in the backward",
        "head and loss in 4 chunks, logits computed when they are read",
    ]
    assert rewrite.verify(model, small, tokens()).passed


def test_dropout_in_an_adapter_is_in_the_way_in_training_alone() -> None:
    model = adapted(0.1)
    small = rewrite.optimize(model, "chunk-ffn{chunks=4},chunk-loss{chunks=4}", example_inputs=tokens())
    assert not rewrite.report(small).changes
    assert len(rewrite.report(small).refusals) == 2
    assert all("draws random numbers in the order of" in each.reason for each in rewrite.report(small).refusals)
    assert rewrite.verify(model, small, tokens()).passed
    logits = small.eval()(**tokens()).logits
    small.train()  # what is read later is still that of eval mode
    assert torch.equal(logits, model.eval()(**tokens()).logits)


class Quantized(nn.Linear):
    """Weights of eight bits with a scale for each class, as bitsandbytes has them: a linear layer of another class."""

    __module__ = "torch.ao.made_for_this_test"  # a layer that capture calls as it is

    def __init__(self, rows: nn.Linear) -> None:
        super().__init__(rows.in_features, rows.out_features, bias=False, device="meta")
        del self.weight
        self.scale = nn.Parameter(rows.weight.detach().abs().amax(1) / 127)
        self.register_buffer("codes", (rows.weight.detach() / self.scale.unsqueeze(1)).round().to(torch.int8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.codes.to(x.dtype) * self.scale.unsqueeze(1))


def test_a_quantized_head_is_called_as_a_module() -> None:
    model = Headed(with_logits)
    model.head = Quantized(model.head)  # type: ignore[assignment]
    small = chunked(model, batch())
    expected = step(model, batch())
    assert "head.scale" in expected
    assert_close(expected, step(small, batch()))
    assert torch.allclose(small(**batch())[1], model(**batch())[1], rtol=1e-6)


# What is refused.


def refusals(model: nn.Module, inputs: Any, **options: Any) -> list[tuple[str, str]]:
    told = rewrite.report(rewrite.optimize(model, passes=[ChunkLoss(**options)], example_inputs=inputs))
    assert not told.changes
    return [(entry.path, entry.reason) for entry in told.refusals]


def test_a_model_without_a_loss() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    assert refusals(model, torch.randn(2, 8)) == [
        (
            "",
            "no graph of the model computes a cross-entropy; have the model compute its loss (give it labels), or "
            "compute the loss in a module around it and optimize that",
        )
    ]


def test_logits_used_elsewhere() -> None:
    def with_accuracy(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model.head(hidden)
        right = (logits.argmax(-1) == labels).float().mean()
        return functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1)), right

    ((_, reason),) = refusals(Headed(with_accuracy), batch())
    assert reason.startswith("Linear 'head' (test_chunk_loss.py:")
    assert reason.endswith(") is also used elsewhere than in the loss")


def test_a_head_that_draws_random_numbers() -> None:
    def noisy(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = functional.dropout(model.head(hidden), 0.5, model.training)
        return functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))

    ((_, reason),) = refusals(Headed(noisy), batch())
    assert "draws random numbers in the order of positions" in reason


def test_targets_that_are_probabilities() -> None:
    def soft(model: Headed, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        targets = torch.softmax(labels.float().unsqueeze(-1).expand(-1, -1, CLASSES), -1)
        return functional.cross_entropy(model.head(hidden).transpose(1, 2), targets.transpose(1, 2))

    ((_, reason),) = refusals(Headed(soft), batch(ignored=0.0))
    assert reason.startswith("the targets are probabilities")


def test_nothing_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """ms-swift#7090: chunks that cost time and memory."""
    monkeypatch.undo()
    entry = ZOO["bert"]  # classifies whole sequences: two rows, three classes
    ((_, reason),) = refusals(entry.build(), entry.inputs(2, 12), chunks=2)
    assert reason == (
        "the loss holds 72 bytes at most as it is, and would hold 280 in 2 chunks; it saves nothing with so few rows "
        "or classes"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"chunks": 0},
            "chunk-loss{chunks=0}: chunks is a whole number from 1\nNext: leave it out to have it chosen",
        ),
        (
            {"logits": "lose"},
            "chunk-loss{logits=lose}: there is no such choice\nNext: choose one of auto, keep, drop",
        ),
    ],
)
def test_options_that_do_not_fit_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PassError) as caught:
        ChunkLoss(**options)
    assert str(caught.value) == message


# Life.


def test_copies_and_pickles_still_train() -> None:
    model = Headed(heads.flat)
    small = chunked(model, batch())
    expected = step(model, batch())
    assert_close(expected, step(copy.deepcopy(small), batch()))
    assert_close(expected, step(pickle.loads(pickle.dumps(small)), batch()))


def test_estimate_sees_the_logits_gone() -> None:
    model = Headed(heads.flat)
    inputs = batch(16, 64)
    small = chunked(model, inputs, 16)
    before, after = rewrite.estimate(model, inputs), rewrite.estimate(small, inputs)
    assert before.peak_bytes - after.peak_bytes > 16 * 64 * CLASSES * 4
