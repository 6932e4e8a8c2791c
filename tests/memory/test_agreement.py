"""What is predicted on fakes is what real tensors do, and what the allocator hands out."""

from __future__ import annotations

import pytest
import torch

from rewrite.memory import estimate_step
from rewrite.memory.allocator import allocated_peak_bytes
from tests.memory.models import MODELS, recompute_blocks

MIB = 2**20


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.thinned(18)
@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("name", MODELS)
def test_saved_and_peak_bytes_are_the_real_ones(name: str, recompute: bool) -> None:
    model, inputs = MODELS[name]()
    if recompute and not recompute_blocks(model):
        pytest.skip(f"{name} has no repeated blocks")
    predicted = estimate_step(model, inputs)
    measured = estimate_step(model, inputs, real=True)
    allocated = allocated_peak_bytes(model, inputs)

    assert predicted.saved_bytes == pytest.approx(measured.saved_bytes, rel=0.01)
    assert predicted.peak_bytes == pytest.approx(allocated, rel=0.002, abs=MIB // 16)
    assert predicted.flops == measured.flops
    assert not predicted.assumptions


@pytest.mark.thinned(2)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_peak_with_an_optimizer_is_the_allocators(name: str, optimizer: str) -> None:
    model, inputs = MODELS[name]()
    predicted = estimate_step(model, inputs, optimizer=optimizer)

    assert predicted.peak_bytes == pytest.approx(allocated_peak_bytes(model, inputs, optimizer=optimizer), rel=0.002)


def test_recompute_saves_less_and_works_more() -> None:
    model, inputs = MODELS["llama"]()
    plain = estimate_step(model, inputs)
    recompute_blocks(model)
    recomputed = estimate_step(model, inputs)

    assert recomputed.saved_bytes < plain.saved_bytes / 4
    assert recomputed.peak_bytes < plain.peak_bytes
    assert recomputed.flops.forward == plain.flops.forward
    assert recomputed.flops.backward > plain.flops.backward
    assert recomputed.seconds("a100") > plain.seconds("a100")


def test_categories_and_saved_places_add_up() -> None:
    model, inputs = MODELS["bert"]()
    estimate = estimate_step(model, inputs, optimizer="adamw")

    assert sum(estimate.by_category.values()) == estimate.peak_bytes
    assert estimate.by_category["parameter"] == sum(parameter.nbytes for parameter in model.parameters())
    assert sum(place.bytes for place in estimate.saved) == estimate.saved_bytes
    assert max(estimate.phases.values()) == estimate.peak_bytes == max(level for _, level in estimate.curve)
    assert list(estimate.phases) == ["forward", "backward", "optimizer"]


@pytest.mark.thinned(6)
@pytest.mark.parametrize("policy", ["blocks", "sqrt"])
@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_our_own_checkpoint_is_measured_as_it_runs(name: str, policy: str) -> None:
    import rewrite
    from passes import Checkpoint

    model, inputs = MODELS[name]()
    rewritten = rewrite.optimize(model, passes=[Checkpoint(policy=policy)], example_inputs=inputs)
    predicted = estimate_step(rewritten, inputs)

    assert predicted.saved_bytes == pytest.approx(estimate_step(rewritten, inputs, real=True).saved_bytes, rel=0.01)
    assert predicted.peak_bytes == pytest.approx(allocated_peak_bytes(rewritten, inputs), rel=0.002, abs=MIB // 16)
    assert predicted.peak_bytes < estimate_step(model, inputs).peak_bytes
