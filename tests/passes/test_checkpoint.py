"""What Checkpoint tags, what it refuses, and that bytes fall."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode
from torch import nn
from torch.nn import functional

import rewrite
from passes import Checkpoint
from rewrite import KEEP, RECOMPUTE, PassError, PassResult, SelectorError, pipeline
from rewrite.text import program_text
from tests.passes.models import Layer, Model, Plain, tokens


def applied(model: nn.Module, checkpoint: Checkpoint, *inputs: Any) -> PassResult:
    """The result on a fresh program, held to the contract."""
    program = rewrite.capture(model, inputs or (tokens(),))
    return pipeline.run(program, [checkpoint]).steps[0].result


def changed(model: nn.Module, checkpoint: Checkpoint, *inputs: Any) -> dict[str, tuple[str, ...]]:
    """Path and instances of each change."""
    result = applied(model, checkpoint, *inputs)
    assert not result.refusals
    return {change.path: change.instances for change in result.changes}


def train(model: nn.Module, *inputs: Any) -> list[torch.Tensor]:
    """Loss and gradients of a step from a fixed seed."""
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(*inputs)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def assert_trains_alike(model: nn.Module, checkpoint: Checkpoint, *inputs: Any) -> None:
    small = rewrite.optimize(model, passes=[checkpoint], example_inputs=inputs)
    expected = train(model, *inputs)
    assert all(map(torch.equal, expected, train(small, *inputs)))
    assert len(expected) > 1


# Options.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"policy": "all"},
            "checkpoint{policy=all}: there is no such policy\nNext: choose one of blocks, sqrt, cheap",
        ),
        (
            {"every": 0},
            "checkpoint{every=0}: every is a whole number from 1\nNext: leave it out to recompute every block",
        ),
        (
            {"every": True},
            "checkpoint{every=True}: every is a whole number from 1\nNext: leave it out to recompute every block",
        ),
        (
            {"every": 1.5},
            "checkpoint{every=1.5}: every is a whole number from 1\nNext: leave it out to recompute every block",
        ),
        (
            {"every": 2, "policy": "sqrt"},
            "checkpoint: `every` counts blocks: it goes with policy=blocks and without `select`\n"
            "Next: leave one of them out",
        ),
        (
            {"every": 2, "select": "layers"},
            "checkpoint: `every` counts blocks: it goes with policy=blocks and without `select`\n"
            "Next: leave one of them out",
        ),
    ],
)
def test_options_that_do_not_fit_are_told(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PassError) as caught:
        Checkpoint(**options)
    assert str(caught.value) == message


# Blocks.


def test_every_block_is_recomputed_from_its_inputs() -> None:
    model = Model(4)
    paths = tuple(f"layers.{index}" for index in range(4))
    assert changed(model, Checkpoint()) == {"layers.0": paths}
    block = applied(model, Checkpoint()).program.region("layers.0")
    (segment,) = block.segments().values()
    assert list(segment) == [node for node in block.nodes() if node.op.startswith("call")]


def test_every_second_block_of_each_stack() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Model(5), Model(2)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.one(value) + self.two(value)

    assert changed(Two(), Checkpoint(every=2)) == {
        "one.layers.0": ("one.layers.0", "one.layers.2", "one.layers.4"),
        "two.layers.0": ("two.layers.0",),
    }
    assert_trains_alike(Two(), Checkpoint(every=2), tokens())


def test_what_is_tagged_already_stays_and_the_rest_is_tagged_around_it() -> None:
    passes = [Checkpoint(select="layers.*.mlp"), Checkpoint()]
    steps = pipeline.run(rewrite.capture(Model(3), (tokens(),)), passes).steps
    once, twice = (step.after.region("layers.0").segments() for step in steps)
    assert [node.name for node in twice[0]] == [node.name for node in once[0]]
    assert len(twice) == 3
    model = Model(3)
    small = rewrite.optimize(model, passes=passes, example_inputs=(tokens(),))
    assert all(map(torch.equal, train(model, tokens()), train(small, tokens())))


# Select.


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("layers.*", {"layers.0": ("layers.0", "layers.1", "layers.2", "layers.3")}),
        ("layers.[02]", {"layers.0": ("layers.0", "layers.2")}),
        ("**.attention", {"layers.0": ("layers.0", "layers.1", "layers.2", "layers.3")}),
        (("layers.1", "layers.3.mlp"), {"layers.1": ("layers.1",), "layers.3": ("layers.3",)}),
        ("head", {"": ("",)}),
    ],
)
def test_globs_select_blocks_and_parts_of_blocks(select: Any, expected: dict[str, tuple[str, ...]]) -> None:
    assert changed(Model(4), Checkpoint(select=select)) == expected
    assert_trains_alike(Model(4), Checkpoint(select=select), tokens())


def test_a_part_of_a_block_is_tagged_and_the_rest_is_not() -> None:
    block = applied(Model(2), Checkpoint(select="layers.*.attention")).program.region("layers.0")
    tagged = {node.name for node in block.nodes() if RECOMPUTE in node.meta}
    assert {"attention_query", "softmax", "attention_value"} <= tagged
    assert not any(name.startswith(("mlp", "norm", "add")) for name in tagged)


def test_each_selected_module_is_a_segment_of_its_own() -> None:
    checkpoint = Checkpoint(select=("**.attention", "**.mlp"))
    segments = applied(Model(2), checkpoint).program.region("layers.0").segments()
    assert [nodes[0].name for nodes in segments.values()] == ["attention_query", "mlp_0"]
    assert_trains_alike(Model(2), checkpoint, tokens())


def test_selected_blocks_are_left_to_their_own_graph() -> None:
    program = applied(Model(3), Checkpoint(select="layers.*")).program
    assert not program.region("").segments()
    assert len(program.region("layers.0").segments()) == 1


@pytest.mark.thinned(2)
@pytest.mark.parametrize("select", ["layer", ("layers.0", "layers.9"), "layers.0.attention.nothing"])
def test_a_glob_that_selects_nothing_is_an_error(select: Any) -> None:
    missing = select if isinstance(select, str) else select[-1]
    with pytest.raises(SelectorError) as caught:
        applied(Model(2), Checkpoint(select=select))
    assert str(caught.value) == (
        f"checkpoint{{select={missing}}}: it matches no module that a graph of the model runs\n"
        "Next: give a path as named_modules() shows it, with * for one component and ** for any number"
    )


# Segments.


def sizes(model: nn.Module, *inputs: Any) -> list[int]:
    """How many calls of modules each segment of the root holds, in order."""
    result = applied(model, Checkpoint(policy="sqrt"), *inputs)
    segments = result.program.region("").segments()
    return [sum(node.op == "call_module" for node in nodes) for _, nodes in sorted(segments.items())]


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("layers", "expected"), [(2, [1, 1]), (4, [2, 2]), (5, [2, 1, 2]), (9, [3, 3, 3]), (12, [3, 3, 3, 3])]
)
def test_segments_are_about_the_square_root_of_the_depth(layers: int, expected: list[int]) -> None:
    assert sizes(Model(layers)) == expected


def test_segments_of_unequal_blocks_have_about_equal_bytes() -> None:
    layers = [Layer(inner=16) for _ in range(6)] + [Layer(inner=256) for _ in range(3)]
    found = sizes(Model(layers))
    assert sum(found) == 9
    assert found[0] == 6
    assert_trains_alike(Model(layers), Checkpoint(policy="sqrt"), tokens())


def test_a_model_without_blocks_is_cut_between_its_modules() -> None:
    hidden = torch.randn(3, 8)
    assert sum(sizes(Plain(), hidden)) >= 12
    assert_trains_alike(Plain(), Checkpoint(policy="sqrt"), hidden)


def test_a_change_names_first_and_last() -> None:
    result = applied(Model(5), Checkpoint(policy="sqrt"))
    assert [change.summary for change in result.changes] == [
        "recompute layers.0 to layers.1, 2 in a row, in the backward",
        "recompute layers.2 in the backward",
        "recompute layers.3 to layers.4, 2 in a row, in the backward",
    ]


# Refusals.


def refusals(model: nn.Module, checkpoint: Checkpoint, *inputs: Any) -> dict[str, str]:
    return {refusal.path: refusal.reason for refusal in applied(model, checkpoint, *inputs).refusals}


def test_a_model_without_blocks_is_refused_with_a_way_out() -> None:
    assert refusals(Plain(), Checkpoint(), torch.randn(3, 8)) == {
        "": "the model has no stack of repeated blocks with a graph; use policy=sqrt, or name modules with select="
    }


def test_a_model_of_few_modules_is_refused_segments() -> None:
    assert refusals(nn.Sequential(nn.Linear(8, 8)), Checkpoint(policy="sqrt"), torch.randn(3, 8)) == {
        "": "the model's graph calls too few modules in a row to make segments of; name modules with select="
    }


class Overwriting(Model):
    """Changes each layer's input once the layer has run."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(value)
        for layer in self.layers:
            made = layer(hidden.clone() if layer is self.layers[1] else hidden)
            hidden.mul_(0.5)
            hidden = made
        return hidden.mean()


def test_a_block_whose_input_is_written_later_is_refused() -> None:
    result = applied(Overwriting(3), Checkpoint())
    line = Overwriting.forward.__code__.co_firstlineno + 4
    reason = (
        f"its input is changed in place at test_checkpoint.py:{line}, after the block has run; "
        "write that line without the in-place operation to have the block recomputed"
    )
    assert {refusal.path: refusal.reason for refusal in result.refusals} == {"layers.0": reason, "layers.2": reason}
    assert [change.instances for change in result.changes] == [("layers.1",)]


class HalfCast(Layer):
    """Opens a span of autocast around its attention alone."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.attention(hidden)
        return hidden.float()


def test_half_a_span_of_autocast_cannot_be_recomputed() -> None:
    class Opening(HalfCast):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.mlp(hidden)
            return super().forward(hidden)

    program = rewrite.capture(Model([Opening(), Opening()]), (tokens(),))
    region = program.region("layers.0")
    entering = next(node for node in region.nodes() if "enter_autocast" in str(node.target))
    entering.meta["module_path"] = "layers.0.mlp"
    result = Checkpoint(select="layers.*.mlp").apply(program)
    assert [refusal.reason for refusal in result.refusals] == [
        "a no_grad or autocast span begins inside it and ends outside; select a module around the whole span"
    ]
    assert not result.changes


def test_a_whole_span_of_autocast_is_recomputed() -> None:
    assert_trains_alike(Model([HalfCast(), HalfCast()]), Checkpoint(), tokens())


def test_a_hook_inside_a_span_is_refused_by_name() -> None:
    model = Model([HalfCast(), HalfCast()])
    for layer in model.layers:
        layer.attention.query.register_forward_hook(lambda *_: None)
    told = refusals(model, Checkpoint())
    assert list(told) == ["layers.0", "layers.1"]
    assert set(told.values()) == {
        "the module 'attention.query' runs in a no_grad or autocast span of it and must run once, for its hooks or its "
        "own Python; remove the hooks, or leave this module out"
    }


def test_a_hooked_module_ends_a_segment_and_its_hook_fires_once() -> None:
    model, fired = Model(2), []
    for layer in model.layers:
        layer.norm.register_forward_hook(lambda *_: fired.append(1))
    block = applied(model, Checkpoint()).program.region("layers.0")
    (norm,) = [node for node in block.nodes() if node.target == "norm"]
    assert RECOMPUTE not in norm.meta
    assert len(block.segments()) == 2
    small = rewrite.optimize(model, passes=[Checkpoint()], example_inputs=(tokens(),))
    fired.clear()
    train(small, tokens())
    assert len(fired) == 2


class Passing(nn.Module):
    """Layers that are given a cache each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeping() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        from transformers import DynamicCache

        cache = DynamicCache()
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, cache, index)
        return hidden.pow(2).mean()


class Keeping(Layer):
    """Puts its input into the cache."""

    def forward(self, hidden: torch.Tensor, cache: Any, index: int) -> torch.Tensor:
        keys, _ = cache.update(hidden[:, None], hidden[:, None], index)
        return super().forward(keys[:, 0])


def test_blocks_that_pass_a_cache_are_taken_one_by_one() -> None:
    result = applied(Passing(), Checkpoint(policy="sqrt"), torch.randn(2, 5, 8))
    assert [(refusal.path, refusal.reason) for refusal in result.refusals] == [
        (
            "layers.0",
            "recomputed by itself, as it is given a cache: turn the cache off (use_cache=False) to have segments of "
            "several blocks",
        )
    ]
    assert {path for change in result.changes for path in change.instances} == {f"layers.{index}" for index in range(3)}
    assert_trains_alike(Passing(), Checkpoint(policy="sqrt"), torch.randn(2, 5, 8))


def test_every_refusal_and_change_is_one_sentence() -> None:
    told: list[str] = []
    for model, value in ((Plain(), torch.randn(3, 8)), (Model(3), tokens()), (Overwriting(3), tokens())):
        for checkpoint in (Checkpoint(), Checkpoint(policy="sqrt")):
            result = applied(model, checkpoint, value)
            told += [change.summary for change in result.changes] + [refusal.reason for refusal in result.refusals]
    assert told
    assert not [sentence for sentence in told if sentence.endswith(".") or "\n" in sentence or not sentence.strip()]


class Counting(Layer):
    """Python of its own, which must run once: it counts its calls in a buffer and asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(hidden) if hidden.sum().item() > -1e9 else hidden


@pytest.mark.thinned(6)
@pytest.mark.parametrize("policy", ["blocks", "sqrt"])
@pytest.mark.parametrize("place", [0, 2])
def test_a_module_without_a_graph_is_never_run_twice(place: int, policy: str) -> None:
    layers = [Layer() for _ in range(5)]
    layers[place] = Counting()
    layers[place - 2].mlp.insert(0, nested := Counting())
    model = Model(layers)
    small = rewrite.optimize(model, passes=[Checkpoint(policy=policy)], example_inputs=(tokens(),))
    assert rewrite.report(small).opaque
    assert rewrite.report(small).changes
    expected = train(model, tokens())
    assert [layers[place].calls, nested.calls] == [1, 1]
    assert all(map(torch.equal, expected, train(small, tokens())))
    assert [layers[place].calls, nested.calls] == [2, 2]


# Kept values.


class Routed(Layer):
    """Keeps the two largest scores."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scores, places = torch.topk(self.norm(hidden), 2, dim=-1)
        return hidden + self.mlp(hidden) * functional.one_hot(places, 8).sum(-2) * scores.sum(-1, keepdim=True)


def test_routing_decisions_are_kept() -> None:
    block = applied(Model([Routed(), Routed()]), Checkpoint()).program.region("layers.0")
    assert [node.name for node in block.nodes() if KEEP in node.meta] == ["topk"]
    assert_trains_alike(Model([Routed(), Routed()]), Checkpoint(), tokens())


# Bytes.


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    "checkpoint", [Checkpoint(), Checkpoint(policy="sqrt"), Checkpoint(every=2), Checkpoint(select="**.mlp")], ids=str
)
def test_saved_bytes_fall(checkpoint: Checkpoint) -> None:
    model, inputs = Model(4), (tokens(8, 32),)
    small = rewrite.optimize(model, passes=[checkpoint], example_inputs=inputs)
    before, after = (rewrite.estimate(module, inputs).saved_bytes for module in (model, small))
    assert after < before
    if checkpoint == Checkpoint():
        assert after < 0.3 * before


# Golden text.


class TextFile(SingleFileSnapshotExtension):
    _write_mode = WriteMode.TEXT
    file_extension = "txt"


GOLDEN: dict[str, Callable[[], tuple[nn.Module, Checkpoint, torch.Tensor]]] = {
    "blocks": lambda: (Model(3), Checkpoint(every=2), tokens()),
    "sqrt": lambda: (Model([Routed(), Layer(), Layer()]), Checkpoint(policy="sqrt"), tokens()),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", GOLDEN)
def test_tagged_program(name: str, snapshot: SnapshotAssertion) -> None:
    model, checkpoint, value = GOLDEN[name]()
    assert program_text(applied(model, checkpoint, value).program) + "\n" == snapshot.use_extension(TextFile)
