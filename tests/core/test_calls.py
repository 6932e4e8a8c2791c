"""Calls are taken apart and put together again without loss."""

from __future__ import annotations

import copy
import enum
from collections import Counter, OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from rewrite import calls


class Pair(NamedTuple):
    first: Any
    second: Any


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Record:
    hidden: Any
    scale: float = 1.0
    unset: Any = field(init=False)

    def __post_init__(self) -> None:
        self.cached = self.scale * 2


@dataclass(frozen=True)
class Frozen:
    hidden: Any


class Bag(dict[str, Any]):
    pass


class Line(list[Any]):
    pass


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from([torch.float16, torch.device("cpu"), Colour.RED, ..., 2j, torch.preserve_format])
)
TENSORS = st.integers(0, 3).map(lambda size: torch.arange(size, dtype=torch.float32))
VALUES = st.recursive(
    SCALARS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Record, inner, st.floats(allow_nan=False))
        | st.builds(Frozen, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2).map(Bag)
        | st.lists(inner, max_size=2).map(Line)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2).map(OrderedDict)
        | st.builds(SimpleNamespace, hidden=inner)
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """Equal in type and content; tensors by identity."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one is other
    if isinstance(one, float):
        return repr(one) == repr(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Record | Frozen | SimpleNamespace):
        return same(vars(one), vars(other))
    return bool(one == other)


@given(VALUES)
def test_rebuild_gives_an_equal_value(value: Any) -> None:
    parts = calls.split(value)
    assert same(calls.rebuild(parts.skeleton, parts.leaves), value)


@given(VALUES)
def test_join_gives_an_equal_value_with_the_same_objects(value: Any) -> None:
    for opened in (True, False):
        parts = calls.split(value, opened=opened)
        assert same(calls.join(parts.skeleton, parts.leaves), value)
    if calls.is_object(value):
        assert calls.join(parts.skeleton, parts.leaves) is value


@given(VALUES)
def test_skeletons_are_hashable_and_the_same_for_the_same_kind(value: Any) -> None:
    parts = calls.split(value)
    assert hash(parts.skeleton) == hash(calls.split(value).skeleton)
    assert parts.skeleton == calls.split(value).skeleton
    again = calls.rebuild(
        parts.skeleton, [torch.clone(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in parts.leaves]
    )
    assert calls.split(again).skeleton == parts.skeleton


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1.0, 2.0),
        (True, 1),
        ("a", "b"),
        ((1,), [1]),
        ({"a": 1}, {"b": 1}),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), torch.ones(2, 2)),
        (torch.ones(2), torch.ones(2, device="meta")),
        (None, False),
        (slice(1, None), slice(None, 1)),
        (range(2), range(3)),
        (Colour.RED, "red"),
        (numpy.float64(1), 1.0),
    ],
)
def test_another_kind_of_call_has_another_skeleton(one: Any, other: Any) -> None:
    assert calls.split(one).skeleton != calls.split(other).skeleton


def test_tensors_and_whole_numbers_vary_within_a_kind() -> None:
    one, other = calls.split((torch.ones(2), 3)), calls.split((torch.zeros(5), 4))
    assert one.skeleton == other.skeleton
    assert one.leaves[1:] == [3]
    assert other.leaves[1:] == [4]


def test_numbers_that_are_not_leaves_compare_by_value() -> None:
    for value in (numpy.float32(2), range(3), 2j, float("nan")):
        assert calls.split(value).skeleton == calls.split(copy.deepcopy(value)).skeleton


def test_a_model_output_is_of_its_class_and_holds_what_is_there() -> None:
    output = BaseModelOutput(last_hidden_state=torch.ones(2), attentions=(torch.zeros(1),))
    parts = calls.split(output)
    made = calls.join(parts.skeleton, parts.leaves)
    assert type(made) is BaseModelOutput
    assert made is not output
    assert list(made) == ["last_hidden_state", "attentions"]
    assert made.last_hidden_state is made[0] is output.last_hidden_state
    assert made.hidden_states is None


def test_what_torch_functions_return_keeps_its_names() -> None:
    found = torch.ones(2, 2).max(dim=1)
    parts = calls.split(found)
    made = calls.join(parts.skeleton, parts.leaves)
    assert type(made) is type(found)
    assert made.values is found.values


def test_mappings_of_their_own_kind() -> None:
    lists: Any = defaultdict(list, a=torch.ones(1))
    parts = calls.split(lists)
    made = calls.rebuild(parts.skeleton, parts.leaves)
    assert type(made) is defaultdict
    assert made["missing"] == []
    for value in (Counter(a=2), UserDict(a=1)):
        parts = calls.split(value)
        assert calls.rebuild(parts.skeleton, parts.leaves) == value
        assert type(calls.rebuild(parts.skeleton, parts.leaves)) is type(value)


def test_keys_that_are_no_names_are_kept_by_identity() -> None:
    key = (1, 2)
    parts = calls.split({key: torch.ones(1), Colour.RED: 2})
    made = calls.join(parts.skeleton, parts.leaves)
    assert [next(iter(made)) is key, made[Colour.RED]] == [True, 2]


def cache_of(*sizes: int) -> DynamicCache:
    cache = DynamicCache()
    for layer, size in enumerate(sizes):
        cache.update(torch.ones(1, 2, size, 4), torch.zeros(1, 2, size, 4), layer)
    return cache


def test_a_cache_is_opened_and_made_anew() -> None:
    cache = cache_of(3, 3)
    parts = calls.split(cache)
    made = calls.rebuild(parts.skeleton, parts.leaves)
    assert type(made) is DynamicCache
    assert made is not cache
    assert made.layers[0] is not cache.layers[0]
    assert made.layers[0].keys is cache.layers[0].keys
    made.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
    assert made.get_seq_length() == 4
    assert cache.get_seq_length() == 3


def test_a_cache_is_brought_to_a_state_in_place() -> None:
    longer, cache = calls.split(cache_of(5, 5)), cache_of(3, 3)
    before = calls.split(cache)
    layer = cache.layers[1]
    leaves = [
        mine if calls.is_object(mine) else theirs for mine, theirs in zip(before.leaves, longer.leaves, strict=True)
    ]
    assert calls.join(longer.skeleton, leaves) is cache
    assert cache.layers[1] is layer
    assert cache.get_seq_length(1) == 5


def test_a_closed_cache_is_one_leaf() -> None:
    cache = cache_of(3)
    parts = calls.split((cache, 1), opened=False)
    assert parts.leaves == [cache, 1]
    assert parts.leaves[0] is cache


def test_one_object_twice_stays_one() -> None:
    shared = SimpleNamespace(hidden=torch.ones(1))
    holder = SimpleNamespace(left=shared, right=[shared])
    holder.me = holder
    parts = calls.split(holder)
    made = calls.rebuild(parts.skeleton, parts.leaves)
    assert len(parts.leaves) == 3
    assert made.left is made.right[0]
    assert made.left is not shared
    assert made.me is made
    apart = SimpleNamespace(left=shared, right=[SimpleNamespace(hidden=torch.ones(1))])
    assert calls.split(SimpleNamespace(left=shared, right=[shared])).skeleton != calls.split(apart).skeleton


def test_what_holds_no_tensors_is_the_same_by_identity() -> None:
    layer, function = nn.Linear(1, 1), len
    for value in (layer, function, torch.Generator(), layer.forward, torch, Record):
        parts = calls.split(value)
        assert not parts.leaves
        assert calls.rebuild(parts.skeleton, []) is value
        assert not calls.is_object(value)
    assert calls.split(nn.Linear(1, 1)).skeleton != calls.split(layer).skeleton


def test_same_keeps_what_it_names_alive_and_compares_by_identity() -> None:
    value = [1]
    named = calls.Same(value)
    assert named == calls.Same(value)
    assert hash(named) == hash(calls.Same(value))
    assert named != calls.Same([1])
    assert named != value
    assert named.value is value


def test_objects_records_and_plain_values_are_told_apart() -> None:
    assert calls.is_object(DynamicCache())
    assert calls.is_object(SimpleNamespace())
    for value in (Record(1), Frozen(1), Bag(), Line(), BaseModelOutput()):
        assert calls.is_record(value)
    for value in ({}, [], (), Pair(1, 2), Record, DynamicCache(), torch.ones(1), 1):
        assert not calls.is_record(value)
    for value in (Bag(), Line(), Pair(1, 2), {}, torch.ones(1), "text", Colour.RED, Record):
        assert not calls.is_object(value)


def put(target: Any, key: str) -> None:
    target[key] = torch.ones(1)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [1], lambda value: value.append(2)),
        (lambda: [[1]], lambda value: value[0].append(2)),
        (lambda: {"a": 1}, lambda value: put(value, "a")),
        (lambda: {"a": {}}, lambda value: put(value["a"], "b")),
        (lambda: (Bag(),), lambda value: put(value[0], "a")),
        (lambda: {"a": Record(1)}, lambda value: setattr(value["a"], "hidden", 2)),
        (lambda: Line(), lambda value: value.append(1)),
        (lambda: BaseModelOutput(last_hidden_state=torch.ones(1)), lambda value: put(value, "last_hidden_state")),
    ],
)
def test_contents_tell_that_a_container_was_changed(make: Any, change: Any) -> None:
    value = make()
    before = calls.contents(value)
    assert calls.contents(value) == before
    change(value)
    assert calls.contents(value) != before


def test_contents_leave_out_what_is_changed_in_place_and_what_holds_tensors() -> None:
    value = {"tensor": torch.ones(1), "cache": cache_of(1)}
    before = calls.contents(value)
    value["tensor"].zero_()
    value["cache"].update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
    assert calls.contents(value) == before
