"""Which modules are regions, leaves or containers, and which can share a graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rewrite.capture.structure import (
    Structure,
    differing_attributes,
    find_blocks,
    flags,
    has_hooks,
    is_leaf,
    join_path,
    members,
    path_below,
    signature,
)
from rewrite.capture.watch import Watch


class Block(nn.Module):
    """A linear layer, and a number of its own."""

    def __init__(self, width: int = 4, index: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.index = index
        self.widths = (width, [width])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden)


class Other(Block):
    """Of another class."""


class Stage(nn.Module):
    """Blocks of a width, and a projection to it."""

    def __init__(self, width_in: int, width: int, depth: int) -> None:
        super().__init__()
        self.project = nn.Linear(width_in, width)
        self.blocks = nn.Sequential(*(Block(width, index) for index in range(depth)))


class Wrap(nn.Module):
    """Anything, below a name."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def groups(structure: Structure) -> list[set[str]]:
    """Paths of blocks that share a key, in order of appearance."""
    found: dict[Hashable, set[str]] = {}
    for path, key in structure.blocks.items():
        found.setdefault(key, set()).add(path)
    return list(found.values())


def test_a_list_of_like_modules_is_a_stack_of_one_group() -> None:
    model = Wrap(encoder=Wrap(layers=nn.ModuleList(Block() for _ in range(3))), head=nn.Linear(4, 4))
    structure = find_blocks(model)
    assert groups(structure) == [{"encoder.layers.0", "encoder.layers.1", "encoder.layers.2"}]


def test_sequential_and_dict_hold_stacks_too() -> None:
    assert groups(find_blocks(nn.Sequential(Block(), Block()))) == [{"0", "1"}]
    assert groups(find_blocks(nn.ModuleDict({"a": Block(), "b": Block()}))) == [{"a", "b"}]


def test_lists_of_leaves_and_of_containers_are_no_stacks() -> None:
    linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    pairs = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
    assert not find_blocks(Wrap(linears=linears, pairs=pairs)).blocks


def test_unequal_blocks_are_blocks_of_groups_of_their_own() -> None:
    frozen = Block()
    frozen.linear.weight.requires_grad_(False)
    model = nn.ModuleList([Block(4), Block(8), Block(4), frozen, Block(4).double()])
    assert groups(find_blocks(model)) == [{"0", "2"}, {"1"}, {"3"}, {"4"}]


def test_classes_are_told_apart_and_a_class_that_occurs_once_is_no_block() -> None:
    model = nn.ModuleList([Block(), Other(), Block(), Wrap(inner=nn.Linear(4, 4))])
    assert groups(find_blocks(model)) == [{"0", "2"}]


def test_a_list_of_one_is_a_stack_and_a_sequential_of_one_is_none() -> None:
    assert groups(find_blocks(nn.ModuleList([Block()]))) == [{"0"}]
    assert not find_blocks(nn.Sequential(Block())).blocks


def test_stages_of_different_shape_give_way_to_the_stacks_in_them() -> None:
    model = nn.ModuleList([Stage(3, 4, 2), Stage(4, 8, 3)])
    assert groups(find_blocks(model)) == [
        {"0.blocks.0", "0.blocks.1"},
        {"1.blocks.0", "1.blocks.1", "1.blocks.2"},
    ]


def test_equal_stages_are_the_blocks_and_what_is_in_them_is_not() -> None:
    model = nn.ModuleList([Stage(4, 4, 2), Stage(4, 4, 2)])
    assert groups(find_blocks(model)) == [{"0", "1"}]


def test_stacks_apart_do_not_share_a_group() -> None:
    model = Wrap(encoder=nn.ModuleList([Block(), Block()]), decoder=nn.ModuleList([Block(), Block()]))
    assert groups(find_blocks(model)) == [{"encoder.0", "encoder.1"}, {"decoder.0", "decoder.1"}]


def test_a_hooked_block_stands_apart() -> None:
    model = nn.ModuleList([Block(), Block(), Block()])
    model[1].linear.register_forward_hook(lambda *_: None)
    assert groups(find_blocks(model)) == [{"0", "2"}, {"1"}]


def test_attributes_that_differ_are_named_with_their_place() -> None:
    model = nn.ModuleList(Wrap(inner=Block(index=index)) for index in range(3))
    (key,) = set(find_blocks(model).blocks.values())
    assert find_blocks(model).differing[key] == {("inner", "index")}


def test_attributes_are_compared_by_value_through_lists_and_dicts() -> None:
    one, other = Block(), Block()
    one.table, other.table = {"a": [1, (2.0, None)]}, {"a": [1, (2.0, None)]}
    assert differing_attributes([one, other]) == set()
    other.table["a"][1] = (3.0, None)
    assert differing_attributes([one, other]) == {("", "table")}
    one.flag, other.flag = True, 1
    one.only = 1
    assert differing_attributes([one, other]) == {("", "table"), ("", "flag"), ("", "only")}


def test_objects_count_as_different_unless_they_are_the_same() -> None:
    one, other, thing = Block(), Block(), object()
    one.thing = other.thing = thing
    assert differing_attributes([one, other]) == set()
    other.thing = object()
    assert differing_attributes([one, other]) == {("", "thing")}


def test_signatures_leave_values_out() -> None:
    assert signature(Block()) == signature(Block())
    assert signature(Block(index=1)) == signature(Block(index=2))
    changed = Block()
    changed.register_buffer("extra", torch.zeros(1))
    assert signature(changed) != signature(Block())
    assert signature(Block().to("meta")) != signature(Block())
    without_bias = Block()
    without_bias.linear.bias = None
    assert signature(without_bias) != signature(Block())


def test_torchs_own_layers_are_leaves_unless_they_hold_a_stack() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, batch_first=True)
    assert is_leaf(nn.Linear(1, 1))
    assert is_leaf(layer)
    assert is_leaf(nn.MultiheadAttention(4, 2))
    assert is_leaf(Conv1D(4, 4))
    assert not is_leaf(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    assert not is_leaf(Block())
    assert not is_leaf(nn.Sequential(nn.Linear(1, 1)))


class Derived(nn.Linear):
    """A user's own forward over torch's layer."""


def test_a_class_derived_from_a_torch_layer_is_no_leaf() -> None:
    assert not is_leaf(Derived(1, 1))


def test_every_kind_of_hook_counts() -> None:
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        module = nn.Linear(1, 1)
        assert not has_hooks(module)
        handle = getattr(module, f"register_{register}")(lambda *_: None)
        assert has_hooks(module), register
        handle.remove()
        assert not has_hooks(module)


def test_paths() -> None:
    assert path_below("a.b.c", "a") == "b.c"
    assert path_below("a.b", "") == "a.b"
    assert path_below("a", "a") == ""
    assert path_below("ab.c", "a") is None
    assert path_below("a", "a.b") is None
    assert [join_path("", "a"), join_path("a", ""), join_path("a", "b"), join_path("", "")] == ["a", "a", "a.b", ""]


def test_members_are_what_a_regions_graph_is_made_of() -> None:
    model = Wrap(encoder=Wrap(layers=nn.ModuleList([Block(), Block()])), head=nn.Linear(4, 4))
    structure = find_blocks(model)
    assert members(model, "", structure) == [model, model.encoder, model.encoder.layers, model.head]
    block = model.encoder.layers[0]
    assert members(block, "encoder.layers.0", structure) == [block, block.linear]


def test_flags_tell_modes_hooks_and_requests_to_recompute() -> None:
    def eval_mode(block: Block) -> None:
        block.eval()

    def part_in_eval_mode(block: Block) -> None:
        block.linear.eval()

    def hook_inside(block: Block) -> None:
        block.linear.register_forward_hook(lambda *_: None)

    def request(block: Block) -> None:
        block.linear.gradient_checkpointing = True

    def both(block: Block) -> None:
        part_in_eval_mode(block)
        hook_inside(block)

    seen = []
    for change in (lambda block: None, eval_mode, part_in_eval_mode, hook_inside, request, both):
        block = Block()
        change(block)
        seen.append(flags([block, block.linear]))
    assert len(set(seen)) == len(seen)


def test_a_hook_on_the_region_itself_is_no_flag() -> None:
    block = Block()
    before = flags([block, block.linear])
    block.register_forward_hook(lambda *_: None)  # fires around the region, whatever its graph
    assert flags([block, block.linear]) == before


class Options:
    def __init__(self) -> None:
        self.output_attentions = False
        self.nested = object()


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "an option": lambda model: setattr(model.options, "output_attentions", True),
    "a number": lambda model: setattr(model, "scale", 2.0),
    "a tensor": lambda model: setattr(model, "offset", torch.zeros(1)),
    "an item of a list": lambda model: model.rates.append(0.5),
    "an item of a dict": lambda model: model.table.update(rate=0.5),
    "a forward": lambda model: setattr(model.linear, "forward", lambda value: value),
    "another module": lambda model: setattr(model, "linear", nn.Identity()),
    "one more module": lambda model: model.add_module("more", nn.Linear(4, 4)),
    "a dtype": lambda model: model.to(torch.bfloat16),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_graph_depends_on_is_watched(change: str) -> None:
    model = Block()
    model.options, model.scale, model.offset = Options(), 1.0, torch.ones(1)
    model.rates, model.table = [0.1], {"rate": 0.1}
    watch = Watch(model, "", find_blocks(model))
    before = watch.state()
    assert watch.is_current()
    assert watch.state() == before

    CHANGES[change](model)

    assert not watch.is_current() or watch.state() != before
