"""What a run on fakes records, and what it leaves as it was."""

from __future__ import annotations

import copy
import random
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

import rewrite
from rewrite.tags import RECOMPUTE
from rewrite.text import program_text
from tests.capture.models import Block, Does, Stack, code, hidden, root, same

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Result:
    hidden: torch.Tensor
    sizes: tuple[int, ...] = ()


class Rounded(torch.autograd.Function):
    """Rounds forward, passes the gradient through."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.round()

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def assert_same_as_eager(
    forward: Callable[..., Any], *calls: tuple[Any, ...], variants: int | None = None
) -> nn.Module:
    """Rewritten from the first call, a model with this forward gives on every call what eager does, gradients too."""
    plain, given = Does(forward), Does(forward)
    small = rewrite.optimize(given, example_inputs=copy.deepcopy(calls[0]))
    assert not rewrite.report(small).opaque
    for call in calls:
        plain.zero_grad()
        given.zero_grad()
        mine, theirs = copy.deepcopy(call), copy.deepcopy(call)
        torch.manual_seed(3)
        expected = plain(*theirs)
        torch.manual_seed(3)
        found = small(*mine)
        assert same(found, expected)
        assert same(mine, theirs)
        tensors = [
            leaf for leaf in torch.utils._pytree.tree_leaves((expected, found)) if isinstance(leaf, torch.Tensor)
        ]
        half = len(tensors) // 2
        for sums in (tensors[:half], tensors[half:]):
            if any(tensor.requires_grad for tensor in sums):
                torch.stack([tensor.sum() for tensor in sums if tensor.requires_grad]).sum().backward()
        for one, other in zip(plain.parameters(), given.parameters(), strict=True):
            assert same(one.grad, other.grad)
        assert same(dict(plain.named_buffers()), dict(given.named_buffers()))
    if variants is not None:
        assert vars(small)["forward"].count() == variants
    return small


def counted(module: Does, value: torch.Tensor) -> torch.Tensor:
    module.count += 1
    module.count.mul_(2)
    return module.linear(value) * module.count


def without_grad(module: Does, value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        mean = module.linear(value).mean()
        with torch.enable_grad():
            inner = module.linear(value)
    return inner - mean


def cast(module: Does, value: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inner = module.linear(value)
        with torch.autocast("cpu", enabled=False):
            outer = module.linear(value)
    return inner.float() + outer


def masked(module: Does, value: torch.Tensor) -> torch.Tensor:
    made = module.linear(value)
    made[value > 0] = 0
    made[:, 0] += 1
    made[..., -1:].mul_(3)
    return made


def hooked_tensor(module: Does, value: torch.Tensor) -> torch.Tensor:
    made = module.linear(value)
    made.register_hook(lambda grad: grad * 2)
    return made


def attribute_set(module: Does, value: torch.Tensor) -> torch.Tensor:
    made = module.linear(value)
    made.data = made.data + 1
    return made.mT


def clamped(module: Does, value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        module.linear.weight.clamp_(-0.1, 0.1)
    return module.linear(value)


FORWARDS: dict[str, Callable[..., Any]] = {
    "no_grad": without_grad,
    "autocast": cast,
    "autograd_function": lambda module, value: Rounded.apply(3 * module.linear(value)),
    "in_place": lambda module, value: module.linear(value).add_(value).relu_(),
    "setitem": masked,
    "view_written": lambda module, value: [made := module.linear(value), made.transpose(0, 1).add_(1)][0],
    "out": lambda module, value: torch.add(module.linear(value).detach(), 1, out=torch.empty_like(value)),
    "input_written": lambda module, value: value.mul_(2) + module.linear(value),
    "input_returned": lambda module, value: (value, module.linear(value), value[0]),
    "parameter_read": lambda module, value: value @ module.linear.weight.T + module.linear.bias.mean(),
    "parameter_written": clamped,
    "buffer_written": counted,
    "tensor_hook": hooked_tensor,
    "data_set": attribute_set,
    "random_numbers": lambda module, value: functional.dropout(module.linear(value)) * torch.rand(value.shape[0], 1, 1),
    "grad_inside": lambda module, value: torch.autograd.grad(
        module.linear(value).pow(2).sum(), module.linear.weight, create_graph=True
    )[0],
    "dtype": lambda module, value: module.linear(value).to(torch.float64).type_as(value).half(),
    "einsum": lambda module, value: torch.einsum("bli,oi->blo", value, module.linear.weight),
    "sizes": lambda module, value: module.linear(value).reshape(value.shape[0] * value.shape[1], -1) / value.shape[1],
    "factories": lambda module, value: module.linear(value) + torch.arange(value.shape[1])[:, None] + value.new_ones(1),
    "lists": lambda module, value: torch.cat([module.linear(part) for part in value.split(1, dim=-2)], dim=1),
    "several": lambda module, value: module.linear(value).topk(2).values + module.linear(value).max(-1)[0][..., None],
}  # fmt: skip


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_computes_what_it_did(name: str) -> None:
    assert_same_as_eager(FORWARDS[name], (hidden(),), (hidden(seed=2),))


@pytest.mark.parametrize("name", ["no_grad", "setitem", "random_numbers", "sizes", "factories", "several"])
def test_one_graph_serves_other_sizes(name: str) -> None:
    assert_same_as_eager(FORWARDS[name], (hidden(),), (hidden(2, 9),), (hidden(7, 2),), variants=1)


def test_a_model_that_asks_for_a_size_gets_a_variant_for_each_answer() -> None:
    def forward(module: Does, value: torch.Tensor) -> torch.Tensor:
        return module.linear(value) if value.shape[1] > 4 else -module.linear(value)

    assert_same_as_eager(forward, (hidden(3, 5),), (hidden(3, 9),), (hidden(3, 2),), (hidden(2, 3),), variants=2)


def test_a_size_of_one_or_zero_has_a_variant_of_its_own() -> None:
    assert_same_as_eager(FORWARDS["sizes"], (hidden(),), (hidden(1, 5),), (hidden(3, 1),))
    forward = FORWARDS["in_place"]
    assert_same_as_eager(forward, (hidden(),), (hidden(0, 5),))


def test_a_size_that_depends_on_data_is_recorded() -> None:
    def forward(module: Does, value: torch.Tensor) -> torch.Tensor:
        chosen = value[value[..., 0] > 0]
        return module.linear(chosen) / chosen.shape[0]

    assert_same_as_eager(forward, (hidden(),), (hidden(6, 9),), variants=1)


def test_a_question_about_an_input_makes_a_variant_for_each_answer() -> None:
    def forward(module: Does, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return module.linear(value) if bool(mask.all()) else module.linear(value) * mask

    ones, some = torch.ones(5, 1), torch.tensor([[1.0], [0], [1], [1], [0]])
    assert_same_as_eager(forward, (hidden(), ones), (hidden(), some), (hidden(), ones), variants=2)


ARGUMENTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "nested": (
        lambda module, batch: module.linear(batch["a"][0]) + batch["b"]["c"],
        ({"a": [hidden()], "b": {"c": hidden(seed=2)}},),
        ({"a": [hidden(seed=3)], "b": {"c": hidden(seed=4)}},),
    ),
    "record": (
        lambda module, record: module.linear(record.hidden) * len(record.sizes),
        (Result(hidden(), (1, 2)),),
        (Result(hidden(seed=2), (3,)),),
    ),
    "none": (
        lambda module, value, mask=None: module.linear(value) if mask is None else mask,
        (hidden(), None),
        (hidden(), hidden(seed=2)),
    ),
    "flag": (lambda module, value, flag: module.linear(value) if flag else value, (hidden(), True), (hidden(), False)),
    "rate": (lambda module, value, rate: module.linear(value) * rate, (hidden(), 0.5), (hidden(), 0.25)),
    "number": (
        lambda module, value, number: module.linear(value) if number > 2 else value.repeat(1, number, 1),
        (hidden(), 2),
        (hidden(), 5),
    ),
    "tensor_twice": (
        lambda module, one, other: module.linear(one) + other.mul_(2),
        (hidden(), hidden(seed=2)),
        (hidden(seed=3), hidden(seed=3)),
    ),
    "dtype": (lambda module, value, kind: module.linear(value).to(kind), (hidden(), torch.half), (hidden(), torch.int)),
}  # fmt: skip


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_every_kind(name: str) -> None:
    forward, first, second = ARGUMENTS[name]
    assert_same_as_eager(forward, first, second, first)


def test_one_tensor_given_twice() -> None:
    value = hidden()
    model = Does(lambda module, one, other: module.linear(one) + other.mul_(2))
    small = rewrite.optimize(model, example_inputs=(value.clone(), hidden(seed=2)))
    one, other = value.clone(), value.clone()
    assert same(small(one, one), model(other, other))


OUTPUTS: dict[str, Callable[[Does, torch.Tensor], Any]] = {
    "dict": lambda module, value: {"a": module.linear(value), "b": [value, None], "c": {"d": 3}},
    "record": lambda module, value: Result(module.linear(value), (1, 2)),
    "named": lambda module, value: Point(module.linear(value), "y"),
    "of_torch": lambda module, value: module.linear(value).max(dim=-1),
    "sizes": lambda module, value: (module.linear(value), value.shape[1], value.shape[0] + 1, value.shape),
    "twice": lambda module, value: [made := module.linear(value), made],
    "nothing": lambda module, value: None,
    "constants": lambda module, value: (True, "text", 2.5, torch.float16),
}  # fmt: skip


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_every_kind(name: str) -> None:
    assert_same_as_eager(OUTPUTS[name], (hidden(),), (hidden(2, 9),))


def test_outputs_that_are_one_tensor_stay_one() -> None:
    small = assert_same_as_eager(OUTPUTS["twice"], (hidden(),))
    one, other = small(hidden())
    assert one is other


class Caching(nn.Module):
    """Adds what it has seen before, and puts its input into a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor, cache: DynamicCache | None = None) -> tuple[torch.Tensor, DynamicCache]:
        cache = DynamicCache() if cache is None else cache
        keys, values = cache.update(self.linear(value)[:, None], value[:, None], 0)
        return keys.sum((1, 2)) + values.mean(), cache


def test_a_cache_is_made_and_brought_up_to_date() -> None:
    torch.manual_seed(0)
    model = Caching()
    small = rewrite.optimize(model, example_inputs=(hidden(),))
    assert not rewrite.report(small).opaque
    (one, mine), (other, theirs) = small(hidden()), model(hidden())
    assert same(one, other)
    for seed in (2, 3):
        one, mine_again = small(hidden(seed=seed), mine)
        other, theirs = model(hidden(seed=seed), theirs)
        assert same(one, other)
        assert mine_again is mine
        assert mine.get_seq_length() == theirs.get_seq_length() == 5 * seed
        assert same(mine.layers[0].keys, theirs.layers[0].keys)


def test_writes_are_noted_on_the_node_that_does_them() -> None:
    def forward(module: Does, value: torch.Tensor) -> torch.Tensor:
        made = module.linear(value)
        made.add_(value)
        made[0] = 1
        functional.relu(made, inplace=True)
        return made * value.mul_(2)

    program = rewrite.capture(Does(forward), (hidden(),))
    writes = [node.meta["writes"] for node in root(program).nodes() if "writes" in node.meta]
    assert writes == [("linear",), ("add_",), ("add_",), ("args",)]
    assert root(program).mutated_inputs == ("args",)


def test_written_buffers_are_named() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.norm(value.flatten(0, 1))

    names = tuple(f"norm.{name}" for name in ("num_batches_tracked", "running_mean", "running_var"))
    assert root(rewrite.capture(Normed(), (hidden(),))).written_buffers == names
    assert root(rewrite.capture(Normed().eval(), (hidden(),))).written_buffers == ()
    assert root(rewrite.capture(Does(counted), (hidden(),))).written_buffers == ("count",)


def test_nodes_know_their_module_their_line_and_their_value() -> None:
    program = rewrite.capture(Stack(2), (hidden(),))
    nodes = {node.name: node for node in program.region("blocks.0").nodes() if node.op.startswith("call")}
    assert nodes["tanh"].meta["module_path"] == "blocks.0"
    assert nodes["linear"].meta["module_path"] == "blocks.0.linear"
    file, _, line = nodes["tanh"].meta["source"].partition(":")
    assert file == "models.py"
    source = Path(Block.forward.__code__.co_filename).read_text().split("\n")
    assert "torch.tanh" in source[int(line) - 1]
    assert nodes["tanh"].meta["val"].shape[2] == 4


# Blocks.


def instances(program: rewrite.Program) -> list[tuple[str, ...]]:
    return [region.instances for region in program.regions]


def test_identical_blocks_are_captured_once() -> None:
    assert instances(rewrite.capture(Stack(5), (hidden(),))) == [
        ("",),
        tuple(f"blocks.{index}" for index in range(5)),
    ]


class Scaled(Block):
    """Reads its number."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.linear(value) * self.index


def test_blocks_that_read_what_differs_are_captured_apart() -> None:
    assert instances(rewrite.capture(Stack(3, Scaled), (hidden(),))) == [
        ("",),
        ("blocks.0",),
        ("blocks.1",),
        ("blocks.2",),
    ]


def test_rates_of_dropout_that_differ_are_kept() -> None:
    blocks = [Block(rate=rate) for rate in (0.0, 0.9)]
    model = Stack(blocks)
    small = rewrite.optimize(model, example_inputs=(hidden(),))
    torch.manual_seed(1)
    expected = model(hidden())
    torch.manual_seed(1)
    assert torch.equal(small(hidden()), expected)


def test_one_block_called_many_times_is_one_region() -> None:
    class Looped(Stack):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            value = self.first(value)
            for _ in range(3):
                value = self.blocks[0](value)
            return value.mean()

    program = rewrite.capture(Looped(1), (hidden(),))
    assert instances(program) == [("",), ("blocks.0",)]
    assert [node.target for node in root(program).nodes() if node.op == "call_module"] == ["first", *["blocks.0"] * 3]


# What has no graph.


class Asks(Block):
    """Branches on the data of what it computed."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made = self.linear(value)
        return made if made.sum() > 0 else -made


class Remembers(Block):
    """Assigns to an attribute."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.last = value.mean()
        return self.linear(value)


REASONS = {
    Asks: "depends on the data of a tensor (`__bool__`)",
    Remembers: "assigns to the attribute 'last' of a module",
}


@pytest.mark.parametrize("kind", REASONS, ids=lambda kind: kind.__name__)
def test_what_has_no_graph_is_named_with_reason_and_line_while_its_siblings_are_captured(kind: type[Block]) -> None:
    model = Stack([Block(), Block(), Block()])
    model.odd = kind()
    forward = Stack.forward
    model.blocks[1].register_module("inner", model.odd)
    del model.odd

    class Mixed(Block):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.inner(super().forward(value))

    model.blocks[1].__class__ = Mixed
    small = rewrite.optimize(model, example_inputs=(hidden(),))
    opaque = {entry.path: entry for entry in rewrite.report(small).opaque}
    assert set(opaque) == {"blocks.1.inner"}
    assert REASONS[kind] in opaque["blocks.1.inner"].reason
    file, _, line = opaque["blocks.1.inner"].source.partition(":")
    assert file == "test_session.py"
    first = kind.forward.__code__.co_firstlineno
    assert first < int(line) <= first + 2
    assert instances(rewrite.report(small).before)[:2] == [("",), ("blocks.0", "blocks.2")]
    torch.manual_seed(1)
    expected = forward(model, hidden())
    torch.manual_seed(1)
    assert torch.equal(small(hidden()), expected)


def test_blocks_below_what_has_no_graph_are_captured() -> None:
    class Root(Stack):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            made = super().forward(value)
            return made if made.item() > 0 else -made

    small = rewrite.optimize(Root(3), example_inputs=(hidden(),))
    assert [entry.path for entry in rewrite.report(small).opaque] == [""]
    assert ("blocks.0", "blocks.1", "blocks.2") in instances(rewrite.report(small).before)


def test_modules_named_opaque_keep_their_own_forward() -> None:
    small = rewrite.optimize(Stack(2), example_inputs=(hidden(),), opaque=["blocks.1"])
    assert {entry.path: entry.reason for entry in rewrite.report(small).opaque} == {"blocks.1": "named in `opaque`"}
    assert torch.isfinite(small(hidden()))


class Collects(Block):
    """Adds a term to the loss through a list it is given."""

    def forward(self, value: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        losses.append(value.pow(2).mean())
        return super().forward(value)


class Collecting(Stack):
    """Sums what its blocks put into a list."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        for block in self.blocks:
            value = block(value, losses)
        return torch.stack(losses).sum() + value.mean()


def test_what_a_block_puts_into_a_list_it_is_given_is_not_lost() -> None:
    model = Collecting(2, Collects)
    small = rewrite.optimize(model, example_inputs=(hidden(),))
    torch.manual_seed(1)
    expected = model(hidden())
    torch.manual_seed(1)
    assert torch.equal(small(hidden()), expected)


CHANGES: dict[str, Callable[[Any], None]] = {
    "list": lambda holder: holder.append(torch.ones(1)),
    "dict": lambda holder: holder.update(a=torch.ones(1)),
    "record": lambda holder: setattr(holder, "hidden", holder.hidden * 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_container_that_is_given_reaches_the_caller(name: str) -> None:
    def forward(module: Does, value: torch.Tensor, holder: Any) -> torch.Tensor:
        CHANGES[name](holder)
        return module.linear(value)

    def holder() -> Any:
        return {"list": [], "dict": {}, "record": Result(torch.ones(1))}[name]

    model = Does(forward)
    small = rewrite.optimize(model, example_inputs=(hidden(), holder()))
    mine, theirs = holder(), holder()
    assert same(small(hidden(), mine), model(hidden(), theirs))
    assert same(mine, theirs)


def test_a_list_of_the_module_gets_real_tensors() -> None:
    def forward(module: Does, value: torch.Tensor) -> torch.Tensor:
        module.seen.append(value.sum())
        return module.linear(value)

    model = Does(forward)
    model.seen = []
    small = rewrite.optimize(model, example_inputs=(hidden(),))
    assert small.seen == model.seen == []
    small(hidden())
    assert [type(value) for value in small.seen] == [torch.Tensor]


# Requests of the model itself.


class Checkpointed(Block):
    """Recomputes its inside by itself."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return 2 * checkpoint(super().forward, value, use_reentrant=False)


def test_a_checkpoint_in_the_users_forward_becomes_a_segment() -> None:
    model = Stack(2, Checkpointed)
    small = rewrite.optimize(model, example_inputs=(hidden(),))
    block = rewrite.report(small).before.region("blocks.0")
    tagged = [node.name for node in block.nodes() if RECOMPUTE in node.meta]
    assert tagged == ["linear", "tanh", "dropout", "add"]
    assert len(block.segments()) == 1
    losses = []
    for module in (model, small):
        torch.manual_seed(1)
        loss = module(hidden())
        loss.backward()
        losses.append(loss)
        losses.append(model.first.weight.grad.clone())
        model.zero_grad()
    assert torch.equal(losses[0], losses[2])
    assert torch.equal(losses[1], losses[3])


# What capture leaves alone.


def trace(model: nn.Module) -> dict[str, Any]:
    """Every attribute of every module, dicts and lists looked into, values by identity."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            found[f"{path}.{name}"] = id(value)
            if isinstance(value, dict):
                found[f"{path}.{name}.items"] = [(key, id(item)) for key, item in value.items()]
            if isinstance(value, list):
                found[f"{path}.{name}.items"] = list(map(id, value))
        if hasattr(module, "config"):
            found[f"{path}.config.items"] = dict(vars(module.config))
    return found


class Config:
    def __init__(self) -> None:
        self.implementation: str | None = None


class Untidy(Stack):
    """Settles an option in its config, and writes to a buffer, while it runs."""

    def __init__(self) -> None:
        super().__init__(2)
        self.config = Config()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.config.implementation = "eager"
        self.calls += 1
        return super().forward(value)


@pytest.mark.parametrize("what", ["capture", "optimize"])
def test_the_model_is_left_as_it_was(what: str) -> None:
    model, value = Untidy(), hidden()
    model.blocks[0].register_forward_hook(lambda *_: None)
    before, versions = trace(model), [tensor._version for tensor in (*model.parameters(), *model.buffers(), value)]
    getattr(rewrite, what)(model, example_inputs=(value,))
    assert trace(model) == before
    assert versions == [tensor._version for tensor in (*model.parameters(), *model.buffers(), value)]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.calls == 0


def test_classes_are_left_as_they_were() -> None:
    owners = (nn.Module, torch.autocast, torch.autograd.Function)
    before = [dict(vars(owner)) for owner in owners]
    rewrite.capture(Stack(2), (hidden(),))
    with pytest.raises(rewrite.CaptureError):
        rewrite.capture(Stack(2), (torch.ones(3, 5),))
    assert before == [dict(vars(owner)) for owner in owners]


def test_random_streams_go_on_as_if_nothing_had_run() -> None:
    def state() -> tuple[Any, ...]:
        return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    stack, drawing = Stack(2), Does(FORWARDS["random_numbers"])
    foreign = Does(lambda module, value: module.linear(value) * numpy.random.rand() * random.random())
    before = state()
    rewrite.capture(stack, (hidden(),))
    rewrite.capture(foreign, (hidden(),))
    rewrite.optimize(drawing, example_inputs=(hidden(),))
    assert state() == before


def test_numbers_that_python_or_numpy_draws_are_drawn_at_every_call() -> None:
    for draw in (random.random, numpy.random.rand):
        model = Does(lambda module, value, draw=draw: module.linear(value) * float(draw()))
        small = rewrite.optimize(model, example_inputs=(hidden(),))
        assert len({float(small(hidden()).detach().sum()) for _ in range(4)}) == 4


def test_grad_mode_of_the_caller_does_not_matter_and_is_kept() -> None:
    model = Stack(2)
    expected = program_text(rewrite.capture(model, (hidden(),)))
    with torch.no_grad():
        assert program_text(rewrite.capture(model, (hidden(),))) == expected
        assert not torch.is_grad_enabled()


# Devices and state.


def test_a_model_on_the_meta_device_has_the_same_program() -> None:
    expected = program_text(rewrite.capture(Stack(3), (hidden(),)))
    model = Stack(3).to("meta")
    assert program_text(rewrite.capture(model, (hidden().to("meta"),))) == expected
    assert program_text(rewrite.capture(model, (hidden(),))) == expected
    assert all(parameter.is_meta for parameter in model.parameters())


def test_tied_weights_are_one_input_of_the_graph() -> None:
    def forward(module: Does, value: torch.Tensor) -> torch.Tensor:
        return functional.linear(module.linear(value), module.other.weight) + module.other.weight.sum()

    model = Does(forward)
    model.other = nn.Linear(4, 4, bias=False)
    model.other.weight = model.linear.weight
    text = code(model, hidden())
    assert text.count("get_attr") == 1
    small = rewrite.optimize(model, example_inputs=(hidden(),))
    assert torch.equal(small(hidden()), model(hidden()))
    assert small.other.weight is small.linear.weight is model.linear.weight


def test_a_forward_that_fails_is_told_with_its_own_words() -> None:
    with pytest.raises(rewrite.CaptureError) as caught:
        rewrite.capture(Stack(2), (torch.ones(3, 5),))
    assert caught.value.subject == "the forward of Stack"
    assert "mat1 and mat2 shapes cannot be multiplied" in caught.value.cause
    assert caught.value.next_step == "check that the example inputs are a call that the model accepts"
    assert caught.value.__cause__ is not None
