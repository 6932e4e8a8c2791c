"""Each method computes what eager does, on models small enough to be quick, and saves where it should."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.bench.methods import PEERS, changes, parts
from tests.bench.models import MODELS, Entry
from tests.bench.step import Memory, State, compare, eager_state, measure, measure_memory
from tests.bench.workload import UnavailableError, Workload

SHORT = {"layers": 4, "width": 32, "length": 64}
TINY = {
    "gpt": Entry("small_gpt", "small_gpt", {**SHORT, "vocabulary": 512}),
    "plain": Entry("small_gpt", "plain_blocks", SHORT),
    "bert": Entry("language", "bert_like", SHORT),
    "llama": Entry("language", "llama_like", {**SHORT, "vocabulary": 512}),
    "gpt2": Entry("language", "gpt2_like", {**SHORT, "vocabulary": 512}),
    "t5": Entry("language", "t5_like", {**SHORT, "layers": 2, "vocabulary": 512}),
    "resnet": Entry("vision", "resnet_like", {"channels": (8, 16), "side": 32}),
    "unet": Entry("vision", "unet_like", {"channels": (8, 16, 32), "side": 32}),
}
RECOMPUTE = ("transformers", "blocks", "sequential", "selective@linear", "selective@alternate")
UNAVAILABLE = {
    ("gpt", "transformers"), ("plain", "transformers"), ("resnet", "transformers"), ("unet", "transformers"),
    ("t5", "sequential"), ("unet", "sequential"),
}  # fmt: skip


def under(model: str, method: str) -> Workload:
    workload = TINY[model].build()
    for change in changes(method):
        change(workload)
    return workload


@functools.cache
def eager(model: str) -> tuple[State, Memory]:
    """What is left by eager's first step, and its bytes."""
    return eager_state(TINY[model]), measure_memory(TINY[model].build())


def state(workload: Workload) -> State:
    loss = workload.step()
    gradients = {
        name: parameter.grad for name, parameter in workload.model.named_parameters() if parameter.grad is not None
    }
    return State(loss, gradients, {})


@pytest.mark.thinned(9)
@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize("method", RECOMPUTE)
def test_recompute_gives_the_same_gradients_and_saves(model: str, method: str) -> None:
    if (model, method) in UNAVAILABLE:
        with pytest.raises(UnavailableError):
            under(model, method)
        return
    workload = under(model, method)

    expected, memory = eager(model)
    assert compare(state(workload), expected).gradient_error == 0
    if method == "blocks":
        assert measure_memory(workload).saved_bytes < 0.8 * memory.saved_bytes


@pytest.mark.thinned(4)
@pytest.mark.parametrize("model", ["gpt", "llama", "gpt2", "t5"])
@pytest.mark.parametrize("method", ["loss@3", "loss-in-forward@3"])
def test_a_chunked_loss_is_the_loss(model: str, method: str) -> None:
    workload, (expected, memory) = under(model, method), eager(model)

    numbers = compare(state(workload), expected)

    assert numbers.loss_error < 1e-6
    assert numbers.gradient_error < 1e-6
    assert measure_memory(workload).peak_bytes < memory.peak_bytes


@pytest.mark.thinned(2)
@pytest.mark.parametrize("model", ["gpt", "plain", "llama"])
def test_a_chunked_feed_forward_is_the_feed_forward(model: str) -> None:
    workload, (expected, memory) = under(model, "ffn@3"), eager(model)

    assert compare(state(workload), expected).gradient_error < 1e-6
    assert measure_memory(workload).saved_bytes < memory.saved_bytes


@pytest.mark.thinned(2)
@pytest.mark.parametrize("method", ["ffn@4", "config-ffn@16"])
def test_a_feed_forward_that_is_a_method_of_its_block_is_chunked(method: str) -> None:
    workload, plain = under("bert", method), TINY["bert"].build()
    for module in [*workload.model.modules(), *plain.model.modules()]:
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # each chunk draws its own

    assert compare(state(workload), state(plain)).gradient_error < 1e-6
    saved, before = measure_memory(workload).saved_bytes, measure_memory(plain).saved_bytes
    assert saved < before if method == "ffn@4" else saved >= before


def test_running_statistics_that_move_twice_show() -> None:
    numbers = measure(TINY["resnet"], "blocks").numbers

    assert numbers.gradient_error == 0
    assert numbers.buffer_error > 0.01


def test_ours_is_any_spec() -> None:
    assert parts("ours:checkpoint{policy=sqrt},other{a=[b+c]}") == [("ours", "checkpoint{policy=sqrt},other{a=[b+c]}")]

    assert compare(state(under("gpt", "ours:")), eager("gpt")[0]).gradient_error == 0


def test_every_method_has_a_name_and_every_model_a_builder() -> None:
    assert all(parts(method) for method in PEERS)
    assert parts("eager") == []
    with pytest.raises(ValueError, match="no method 'cheap'; there are eager, transformers"):
        parts("blocks+cheap")
    assert all(changes(method) for method in PEERS)
    assert {entry.home for entry in MODELS.values()} == {"small_gpt", "language", "vision"}


def test_the_anchor_is_the_small_gpt() -> None:
    workload = MODELS["small-gpt"].build()
    width, layers = 128, 8
    block = 12 * width * width + 13 * width

    assert sum(parameter.numel() for parameter in workload.model.parameters()) == (
        2 * 4096 * width + layers * block + 2 * width
    )
    assert workload.inputs["ids"].shape == (2, 512)
