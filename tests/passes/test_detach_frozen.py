"""What DetachFrozen tags and refuses, and that a partly frozen model trains as before, with less work."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import rewrite
from passes import Checkpoint, ChunkFFN, ChunkLoss, DetachFrozen
from rewrite import CUT, DETACH, RECOMPUTE, PassResult, pipeline
from rewrite.text import program_text
from tests.passes.frozen import batch, bert, linear_calls, products, step_flops
from tests.passes.models import Model, tokens
from tests.zoo.compare import assert_equal, run


def applied(model: nn.Module, inputs: Any, *passes: Any) -> PassResult:
    """The result of the last pass on a fresh program, held to the contract."""
    return pipeline.run(rewrite.capture(model, inputs), passes).steps[-1].result


@functools.lru_cache
def captured() -> rewrite.Program:
    """Of `bert()`."""
    return rewrite.capture(bert(), batch())


def on_bert(*passes: Any) -> PassResult:
    """The same for `bert()`, captured once."""
    return pipeline.run(captured(), passes).steps[-1].result


def small_model() -> nn.Module:
    """Four layers with dropout; the embedding and two layers frozen."""
    model = Model()
    model.embedding.requires_grad_(False)
    model.layers[:2].requires_grad_(False)
    return model


def tagged(result: PassResult, path: str, tag: str = DETACH) -> set[str]:
    return {node.name for node in result.program.region(path).nodes() if tag in node.meta}


def called(result: PassResult, path: str) -> set[str]:
    return {node.name for node in result.program.region(path).nodes() if node.op.startswith("call")}


# What is tagged.


def test_the_frozen_part_across_regions() -> None:
    result = on_bert(DetachFrozen())
    assert [(change.path, change.instances) for change in result.changes] == [
        ("", ("",)),
        ("bert.encoder.layer.0", ("bert.encoder.layer.0", "bert.encoder.layer.1")),
    ]
    assert result.changes[0].summary == "frozen: runs without autograd, and never again in the backward"
    assert tagged(result, "bert.encoder.layer.1") == called(result, "bert.encoder.layer.1")
    assert not tagged(result, "bert.encoder.layer.2")
    root = tagged(result, "")
    assert {"bert_embeddings_LayerNorm", "bert_encoder_layer_0", "bert_encoder_layer_1"} <= root
    assert not {name for name in root if "layer_2" in name or "pooler" in name or "classifier" in name}


def test_a_model_without_frozen_weights_is_left_alone() -> None:
    result = applied(bert(frozen=0), batch(), DetachFrozen())
    assert not result.modified
    (refusal,) = result.refusals
    assert refusal.reason == (
        "no frozen weight is read before the first trained one: freeze some first, with rewrite.freeze(model, ...)"
    )


def test_a_second_time_changes_nothing() -> None:
    for first in ([DetachFrozen()], [Checkpoint(), DetachFrozen()], [DetachFrozen(), Checkpoint("sqrt")]):
        result = on_bert(*first, DetachFrozen())
        assert not result.modified
        assert not result.refusals


@pytest.mark.parametrize("policy", ["blocks", "sqrt", pytest.param("cheap", marks=pytest.mark.sweep)])
def test_the_order_beside_checkpoint_does_not_matter(policy: str) -> None:
    one = on_bert(DetachFrozen(), Checkpoint(policy)).program
    other = on_bert(Checkpoint(policy), DetachFrozen()).program
    assert {node.name for node in other.region("").nodes() if node.meta.keys() >= {RECOMPUTE, DETACH}} == set()
    for path in ("", "bert.encoder.layer.0", "bert.encoder.layer.3"):
        found = [
            {node.name: {tag for tag in (RECOMPUTE, DETACH) if tag in node.meta} for node in each.region(path).nodes()}
            for each in (one, other)
        ]
        assert found[0] == found[1]


def test_nothing_is_tagged_when_gradients_are_off() -> None:
    small = rewrite.optimize(small_model(), [DetachFrozen()], example_inputs=tokens())
    with torch.no_grad():
        small(tokens())
    assert "detach" not in program_text(small.forward.rewriting.results[-1].program)  # type: ignore[union-attr]


class Written(nn.Module):
    """A frozen value that something trained is added to in place, after a view of it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.frozen(x)
        before = base * 2
        base += self.trained(x)
        return (base * before.tanh()).sum()


def test_memory_that_something_trained_writes_to_is_not_frozen() -> None:
    model, inputs = Written(), {"x": torch.randn(3, 4)}
    assert not applied(model, inputs, DetachFrozen()).changes
    for passes in ([DetachFrozen()], [Checkpoint(select="*"), DetachFrozen()]):
        small = rewrite.optimize(model, passes, example_inputs=inputs)
        assert_equal(run(model, inputs), run(small, inputs))


class Drawing(nn.Module):
    """Dropout of what is frozen after dropout of what is trained, and before."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained, self.drop = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8), nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.drop(self.frozen(x))
        middle = self.drop(self.trained(x))
        return (first + middle * self.drop(self.frozen(x + 1)).exp()).tanh().sum()


def test_random_numbers_are_drawn_in_the_same_order() -> None:
    model, inputs = Drawing(), {"x": torch.randn(5, 8)}
    result = applied(model, inputs, DetachFrozen())
    assert tagged(result, "") == {"frozen", "drop", "add", "frozen_1"}
    for passes in (
        [DetachFrozen()],
        [DetachFrozen(), Checkpoint(select="**")],
        [Checkpoint(select="**"), DetachFrozen()],
    ):
        small = rewrite.optimize(model, passes, example_inputs=inputs)
        assert_equal(run(model, inputs), run(small, inputs))


class Spanned(nn.Module):
    """A frozen part under autocast, and a span that is frozen in part."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            first = self.frozen(x)
        with torch.autocast("cpu", torch.bfloat16):
            second = self.trained(first.float()) * self.frozen(x)
        return second.float().tanh().sum()


def test_spans_of_autocast_stay_whole() -> None:
    model, inputs = Spanned(), {"x": torch.randn(5, 8)}
    result = applied(model, inputs, DetachFrozen())
    assert tagged(result, "") == {"enter_autocast", "frozen", "exit_autocast"}
    for passes in (
        [DetachFrozen()],
        [DetachFrozen(), Checkpoint(select="**")],
        [Checkpoint(select="**"), DetachFrozen()],
    ):
        small = rewrite.optimize(model, passes, example_inputs=inputs)
        assert_equal(run(model, inputs), run(small, inputs))


# Parity.

PIPELINES: list[Any] = [
    [Checkpoint("sqrt"), DetachFrozen()],
    *(
        pytest.param(passes, marks=pytest.mark.sweep)
        for passes in (
            [DetachFrozen()],
            [DetachFrozen(), Checkpoint()],
            [Checkpoint(), DetachFrozen()],
            [DetachFrozen(), Checkpoint("sqrt")],
            [DetachFrozen(), Checkpoint("cheap")],
            [Checkpoint("cheap"), DetachFrozen()],
        )
    ),
]


@pytest.mark.parametrize("passes", PIPELINES, ids=lambda passes: ",".join(map(str, passes)))
def test_loss_and_gradients_are_the_same(passes: list[Any]) -> None:
    model = small_model()
    small = rewrite.optimize(model, passes, example_inputs=tokens())
    for inputs in (tokens(), tokens(3, 5)):
        for train in (True, False, True):
            expected, found = (run(each, {"tokens": inputs}, 3, train) for each in (model, small))
            assert_equal(expected, found)


@pytest.mark.sweep
def test_loss_and_gradients_of_bert_are_the_same() -> None:
    model = bert()
    small = rewrite.optimize(model, [DetachFrozen(), Checkpoint()], example_inputs=batch())
    assert_equal(run(model, batch(5, 7), 3), run(small, batch(5, 7), 3))


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", [ChunkFFN(chunks=3), ChunkLoss(chunks=2)], ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_beside_chunks(chunk: Any, first: bool) -> None:
    model, inputs = small_model(), tokens(3, 30)
    passes = [chunk, DetachFrozen(), Checkpoint()] if first else [DetachFrozen(), Checkpoint(), chunk]
    small = rewrite.optimize(model, passes, example_inputs=inputs)
    assert len(rewrite.report(small).changes) >= 4
    expected, found = (run(each, {"tokens": inputs}) for each in (model, small))
    assert expected.grads.keys() == found.grads.keys()
    for name, grad in expected.grads.items():
        assert (grad is None) == (found.grads[name] is None)
        torch.testing.assert_close(found.grads[name], grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(expected.rng_state, found.rng_state)


def test_the_frozen_part_runs_without_autograd() -> None:
    inputs = batch()
    small = rewrite.optimize(bert(), [DetachFrozen()], example_inputs=inputs)
    with products() as modes:
        small(**inputs)
    per_layer = 8
    assert modes[: 2 * per_layer] == [False] * (2 * per_layer)
    assert modes[2 * per_layer :] == [True] * (2 * per_layer + 2)


# Work.


class Tail(nn.Module):
    """The trained end of `bert`: its layers from `first` on and the classifier."""

    def __init__(self, model: Any, first: int) -> None:
        super().__init__()
        self.layers, self.pooler = model.bert.encoder.layer[first:], model.bert.pooler
        self.dropout, self.classifier = model.dropout, model.classifier

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.classifier(self.dropout(self.pooler(hidden))).sum()


@pytest.mark.parametrize("recomputed", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_twelve_layers_nine_of_them_frozen_cost_one_forward_of_these(recomputed: bool) -> None:
    inputs, more = batch(2, 16), [Checkpoint()] if recomputed else []
    model = bert(12, 9)
    hidden = model.bert.embeddings(inputs["input_ids"])
    given = {"hidden": hidden, "mask": torch.ones(2, 1, 16, 16, dtype=torch.bool)}
    tail = rewrite.optimize(Tail(model, 9), more, example_inputs=given)
    with FlopCounterMode(display=False) as prefix:
        for layer in model.bert.encoder.layer[:9]:
            hidden = layer(hidden, given["mask"])
    small = rewrite.optimize(model, [DetachFrozen(), *more], example_inputs=inputs)
    expected = prefix.get_total_flops() + step_flops(tail, given)
    assert abs(step_flops(small, inputs) / expected - 1) <= 0.005


class Pair(nn.Module):
    """A frozen layer, then a trained one, in one block."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(width, width).requires_grad_(False), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.trained(torch.tanh(self.frozen(x))))


@pytest.mark.parametrize("passes", [[DetachFrozen(), Checkpoint(select="0")], [Checkpoint(select="0"), DetachFrozen()]])
def test_a_frozen_layer_in_a_recomputed_block_runs_once(passes: list[Any]) -> None:
    """Three calls of modules, not four: the trained layer runs again for what tanh saves, the frozen one does not."""
    model, x = nn.Sequential(Pair()), torch.randn(4, 8)
    small = rewrite.optimize(model, passes, example_inputs=x)
    with linear_calls() as calls:
        small(x).sum().backward()
    assert [calls.count(layer) for layer in (small[0].frozen, small[0].trained)] == [1, 2]
    grads = [parameter.grad for parameter in small[0].trained.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    assert all(map(torch.equal, grads, [parameter.grad for parameter in model[0].trained.parameters()]))


def test_a_frozen_part_inside_a_recomputed_block_costs_no_work_twice() -> None:
    """The general case: attention frozen, the rest trained, in the first block that is given frozen values."""
    model, inputs = small_model(), {"tokens": tokens(3, 9)}
    model.layers[2].attention.requires_grad_(False)
    small = rewrite.optimize(model, [DetachFrozen(), Checkpoint(select="layers.2")], example_inputs=inputs)
    again = 2 * 27 * 8 * 16  # the first product of the feed-forward part; nothing saves what the second gives
    assert step_flops(small, inputs) - step_flops(model, inputs) == again
    assert_equal(run(model, inputs), run(small, inputs))


# Later changes.


def test_weights_thawed_after_two_steps_are_trained_at_the_third() -> None:
    model, inputs = small_model(), tokens()
    twin = copy.deepcopy(model)
    small = rewrite.optimize(model, [DetachFrozen(), Checkpoint()], example_inputs=inputs)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (twin, small)]
    for step in range(5):
        for each, optimizer in zip((twin, small), optimizers, strict=True):
            if step in (2, 3):
                each.layers[1 if step == 2 else 0].requires_grad_(True)
            if step == 4:
                each.layers[2].requires_grad_(False)
            torch.manual_seed(step)
            optimizer.zero_grad()
            each(inputs).backward()
            optimizer.step()
        for (name, one), other in zip(twin.named_parameters(), small.parameters(), strict=True):
            assert torch.equal(one, other), (step, name)
        if step == 2:
            assert small.layers[1].norm.weight.grad.abs().sum() > 0
            assert small.layers[0].norm.weight.grad is None


def test_what_a_hook_makes_need_a_gradient_gets_one() -> None:
    """As `enable_input_require_grads` of transformers does."""
    model, inputs = small_model(), tokens()
    small = rewrite.optimize(model, [DetachFrozen(), Checkpoint()], example_inputs=inputs)
    given: list[torch.Tensor] = []
    for each in (model, small):
        handle = each.embedding.register_forward_hook(lambda _, __, out: given.append(out.requires_grad_(True)))
        torch.manual_seed(0)
        each(inputs).backward()
        handle.remove()
    one, other = (each.grad for each in given)
    assert one is not None
    assert torch.equal(one, other)


class Shares(nn.Module):
    """A frozen block whose result, a view, the next block writes to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x).view(2, -1)


class Adds(nn.Module):
    """Adds to its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Shares().requires_grad_(False), Shares().requires_grad_(False)])
        self.trained = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.blocks[1](self.blocks[0](x).view(-1, 4))
        value += self.trained(x).view(2, -1)
        return value.tanh().sum()


def test_a_view_from_the_frozen_part_may_be_written_to() -> None:
    model, inputs = Adds(), {"x": torch.randn(6, 4)}
    small = rewrite.optimize(model, [DetachFrozen()], example_inputs=inputs)
    assert_equal(run(model, inputs), run(small, inputs))


# Something trained before.


def behind() -> nn.Module:
    model = bert(4, 0)
    model.bert.encoder.layer[1].requires_grad_(False)
    return model


def test_a_frozen_part_behind_a_trained_one_is_refused() -> None:
    result = applied(behind(), batch(), DetachFrozen())
    assert not result.modified
    (refusal,) = result.refusals
    assert refusal.path == "bert.encoder.layer.1"
    assert refusal.reason == (
        "bert.encoder.layer.1 is frozen and runs after bert.embeddings.word_embeddings, which needs gradients that go "
        "through it: freeze that too, or let gradients end there with cut=True, which leaves it untrained"
    )


def test_a_cut_ends_gradients_and_says_whose() -> None:
    model, inputs = behind(), batch()
    small = rewrite.optimize(model, [DetachFrozen(cut=True), Checkpoint()], example_inputs=inputs)
    change = next(each for each in rewrite.report(small).changes if each.path == "bert.encoder.layer.1")
    assert "gradients end here" in change.summary
    assert "bert.embeddings.word_embeddings" in change.summary
    assert "bert.encoder.layer.0" in change.summary
    assert "bert.encoder.layer.2" not in change.summary
    block = rewrite.report(small).after.region("bert.encoder.layer.1")
    assert {node.meta.get(DETACH) for node in block.nodes() if node.op.startswith("call")} == {CUT}
    found = run(small, inputs, 2)
    expected = run(_cut_by_hand(model), inputs, 2)
    assert_equal(expected, found)
    trained = {name for name, grad in found.grads.items() if grad is not None}
    assert not {name for name in trained if "embeddings" in name or ".layer.0." in name or ".layer.1." in name}
    assert {name for name in trained if ".layer.2." in name}


def _cut_by_hand(model: nn.Module) -> nn.Module:
    made = copy.deepcopy(model)
    made.bert.encoder.layer[1].register_forward_hook(lambda _, __, out: out.detach())
    return made


def test_a_cut_that_leaves_nothing_to_train_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    result = applied(model, torch.randn(2, 4), DetachFrozen(cut=True))
    assert not result.modified
    assert "with gradients ending there nothing would be trained" in result.refusals[0].reason


def test_no_cut_without_need() -> None:
    cut, plain = (on_bert(DetachFrozen(cut=each)).program for each in (True, False))
    assert program_text(cut) == program_text(plain)
