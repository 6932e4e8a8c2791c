"""Outputs of the frozen prefix kept for each example: when they serve, when not, and within which bounds."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint, DetachFrozen
from passes.prefix_store import Memory
from rewrite import Numerics, PassError, pipeline
from tests.passes.frozen import linear_calls
from tests.passes.models import tokens
from tests.passes.test_detach_frozen import small_model
from tests.zoo.compare import assert_equal, run


class Small(nn.Module):
    """A frozen part with dropout, and a trained layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.frozen = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 8))
        self.trained = nn.Linear(8, 1)
        self.embedding.requires_grad_(False)
        self.frozen.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(self.embedding(tokens))).tanh().sum()


def cached(model: nn.Module, cache: str = "memory", **options: Any) -> Any:
    passes = [DetachFrozen(eval_mode=True, cache=cache, **options), Checkpoint()]
    return rewrite.optimize(model, passes, example_inputs=tokens())


def frozen_calls(model: Any, inputs: torch.Tensor) -> int:
    """How often a step runs a layer of the frozen part."""
    with linear_calls() as calls:
        model(inputs).backward()
    return sum(not layer.weight.requires_grad for layer in calls)


ONCE = 2
"""Linear layers of the frozen part."""
FIRST = 3 * ONCE
"""They run for each half of the first batch once more, to see that rows are independent."""


def test_examples_that_come_again_skip_the_prefix() -> None:
    small, inputs = cached(Small()), tokens(6)
    assert frozen_calls(small, inputs) == FIRST
    assert frozen_calls(small, inputs) == 0
    assert frozen_calls(small, inputs[[4, 1, 3]]) == 0
    assert frozen_calls(small, torch.cat([inputs[:2], 15 - inputs[2:]])) == ONCE
    assert frozen_calls(small, inputs[:, :5]) == ONCE
    assert frozen_calls(small, inputs[:, :5]) == 0


@pytest.mark.sweep
def test_what_is_given_back_is_what_was_computed() -> None:
    model = small_model().train()
    small, inputs = cached(model), {"tokens": tokens(6)}
    by_hand = rewrite.optimize(model, [DetachFrozen(eval_mode=True)], example_inputs=tokens())
    expected = run(by_hand, inputs)
    assert_equal(expected, run(small, inputs))
    assert_equal(expected, run(small, inputs))
    order = torch.tensor([5, 0, 3])
    one, other = (run(each, {"tokens": inputs["tokens"][order]}) for each in (by_hand, small))
    for name, grad in one.grads.items():
        if grad is not None:
            torch.testing.assert_close(other.grads[name], grad, rtol=1e-4, atol=1e-6)
    assert rewrite.report(small).numerics is Numerics.REASSOCIATED


def test_verify_holds_it_to_its_numerics() -> None:
    model = Small()
    assert rewrite.verify(model, cached(model), {"tokens": tokens(6)}).passed


def scaled(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)


def scaled_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(2)


def other_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone().mul_(2)


def from_a_vector(module: nn.Module) -> None:
    nn.utils.vector_to_parameters(2 * nn.utils.parameters_to_vector(module.parameters()), module.parameters())


@pytest.fixture(scope="module")
def small() -> Any:
    return cached(Small())


@pytest.mark.parametrize("write", [scaled, scaled_data, other_data, from_a_vector])
def test_other_weights_are_other_keys(write: Any, small: Any) -> None:
    inputs = tokens(4)
    small(inputs)
    write(small.frozen)
    expected = small.trained(small.frozen(small.embedding(inputs))).tanh().sum()
    assert torch.equal(small(inputs), expected)
    assert frozen_calls(small, inputs) == 0


def test_a_buffer_written_through_data_is_noticed() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.trained = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1)
            self.register_buffer("shift", torch.zeros(4, dtype=torch.int32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.trained(self.frozen(x + self.shift))

    model, x = Shifted(), torch.randn(5, 4)
    small = rewrite.optimize(model, [DetachFrozen(cache="memory")], example_inputs=x)
    small(x)
    assert not rewrite.report(small).refusals
    model.shift.data.add_(1)
    torch.testing.assert_close(small(x), model(x))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("part", ["frozen", "embedding"])
def test_a_thawed_weight_is_trained(part: str) -> None:
    small, inputs = cached(Small()), tokens(4)
    small(inputs).backward()
    thawed = small.get_submodule(part).requires_grad_(True)
    small(inputs).backward()
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in thawed.parameters())


def test_the_estimate_counts_a_step_that_computes() -> None:
    model = Small()
    plain = rewrite.optimize(model, [DetachFrozen(eval_mode=True), Checkpoint()], example_inputs=tokens())
    assert rewrite.estimate(cached(model), tokens()).flops == rewrite.estimate(plain, tokens()).flops


# Where a prefix is not kept.


def refusal(model: nn.Module, inputs: Any, **options: Any) -> str:
    result = pipeline.run(rewrite.capture(model, inputs), [DetachFrozen(cache="memory", **options)]).steps[0].result
    return result.refusals[-1].reason


def test_a_random_prefix_is_refused() -> None:
    reason = refusal(Small().train(), tokens())
    assert reason.startswith("the frozen prefix is not cached: frozen.2 draws random numbers (test_prefix_cache.py:")
    assert reason.endswith("hold the frozen part in eval mode with eval_mode=True")


class Normed(nn.Module):
    """A frozen part whose rows depend on one another, in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.frozen, self.norm = nn.Linear(4, 4).requires_grad_(False), nn.BatchNorm1d(4).requires_grad_(False)
        self.trained = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.frozen(x)
        if self.kind == "norm":
            value = self.norm(value)
        if self.kind == "mean":
            value = value - value.mean(0)
        if self.kind == "sum":
            value = value.sum(0)
        return self.trained(value).sum()


def test_batch_statistics_are_refused() -> None:
    assert refusal(Normed("norm").train(), torch.randn(5, 4)).endswith(
        "changes a buffer or a value in place; eval_mode=True keeps batch norms still"
    )


def test_a_result_without_rows_is_refused() -> None:
    assert refusal(Normed("sum"), torch.randn(5, 4)).endswith("sum_1 has no row for each example")


def test_rows_that_depend_on_their_batch_are_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Normed("mean"), torch.randn(5, 4)
    small = rewrite.optimize(model, [DetachFrozen(cache="memory")], example_inputs=x)
    for rows in (x, x[:3], x[:3]):
        assert torch.equal(small(rows), model(rows))
    with linear_calls() as calls:
        small(x)
    assert calls == [small.frozen, small.trained]


def test_a_prefix_with_hooks_runs_every_time() -> None:
    small, inputs = cached(Small()), tokens(4)
    frozen_calls(small, inputs)
    fired: list[int] = []
    small.frozen[0].register_forward_hook(lambda *_: fired.append(1))
    for _ in range(2):
        assert frozen_calls(small, inputs) == ONCE
    assert fired == [1, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": ""}, "detach-frozen{cache=}: cache is neither memory nor a folder\nNext: give cache=memory or"),
        ({"cache": 3}, "detach-frozen{cache=3}: cache is neither memory nor a folder"),
        (
            {"cache": __file__},
            f"detach-frozen{{cache={__file__}}}: {__file__} is a file\nNext: name a folder",
        ),
        ({"cache": f"{__file__}/a/b"}, f"detach-frozen{{cache={__file__}/a/b}}: {__file__} is a file"),
        ({"cache_bytes": 3.5}, "detach-frozen{cache_bytes=3.5}: it is no number of bytes\nNext: give a whole number"),
        ({"cache_bytes": -5}, "detach-frozen{cache_bytes=-5}: it is no number of bytes"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PassError) as caught:
        DetachFrozen(**{"cache": "memory", **options})
    assert str(caught.value).startswith(message)


def test_a_text_that_is_no_number_of_bytes() -> None:
    with pytest.raises(rewrite.RewriteError):
        DetachFrozen(cache="memory", cache_bytes="much")


def values() -> dict[str, torch.Tensor]:
    return {"hidden": torch.ones(4, 4)}


def test_memory_is_bounded_and_drops_what_was_used_longest_ago() -> None:
    store = Memory(2 * 64)
    for key in ("a", "b"):
        store.put(key, values())
    assert store.get("a") is not None
    store.put("c", values())
    assert [store.get(key) is not None for key in "abc"] == [True, False, True]
    assert store.bytes == 128
    store.put("d", {"hidden": torch.zeros(64)})
    assert store.get("d") is None


def test_files_are_found_by_another_run(tmp_path: Path) -> None:
    model, inputs = Small(), tokens(4)
    frozen_calls(cached(model, str(tmp_path)), inputs)
    assert len(list(tmp_path.glob("??/*.safetensors"))) == 4
    again = cached(copy.deepcopy(model), str(tmp_path))
    assert frozen_calls(again, inputs) == 0
    assert torch.equal(again.eval()(inputs), model.eval()(inputs))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.embedding.weight.add_(1)
    assert frozen_calls(cached(other, str(tmp_path)), inputs) == FIRST
