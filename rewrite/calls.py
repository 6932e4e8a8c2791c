"""Take the arguments of a call apart, and put them together again.

A call is split into *leaves* (tensors, whole numbers, objects that hold tensors) and a hashable *skeleton* that says
how they stood. Tensors and whole numbers vary from call to call and are guarded apart; everything else in the
skeleton must be equal for two calls to be of one kind. Objects that hold tensors (a key-value cache) are opened too,
because a forward may change them.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
PRIMITIVES = (bool, str, bytes, complex, type(None), type(...), torch.dtype, torch.device, torch.layout)
STATIC = (
    torch.nn.Module,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    enum.Enum,
    torch.memory_format,
)
CLOSED_PACKAGES = frozenset({"torch", "functools", "logging", "threading", "numpy", "builtins"})
MAX_ITEMS = 200_000


class Same:
    """Compares by identity, and keeps its object alive so that the identity stays its own."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


@dataclass
class Parts:
    """What `split` found."""

    skeleton: Hashable
    leaves: list[Any] = field(default_factory=list)
    """Tensors, whole numbers and opened objects, in order."""


def split(value: Any, *, opened: bool = True) -> Parts:
    """Take `value` apart; `join(parts.skeleton, parts.leaves)` gives an equal value.

    With `opened=False` an object that holds tensors is one leaf.
    """
    walk = _Walk(opened)
    skeleton = walk.visit(value)
    return Parts(skeleton, walk.leaves)


def split_object(value: Any) -> Parts:
    """Take one object apart, with the objects inside it as leaves; its own leaf comes first."""
    walk = _Walk(False)
    content = [(name, walk.visit(item)) for name, item in vars(value).items()]
    return Parts(("object", type(value), *content), [value, *walk.leaves])


def holds_unseen(skeleton: Any) -> bool:
    """Whether the call holds a value known by identity alone whose content may change between two calls."""
    if isinstance(skeleton, Same):
        return not isinstance(skeleton.value, STATIC) and hasattr(type(skeleton.value), "__iter__")
    return isinstance(skeleton, tuple) and any(holds_unseen(item) for item in skeleton)


def is_object(value: Any) -> bool:
    """Whether `split` opens `value` as an object that may hold tensors."""
    if isinstance(value, (torch.Tensor, *PRIMITIVES, *STATIC, list, dict, tuple)) or not hasattr(value, "__dict__"):
        return False
    if is_record(value):
        return False
    return type(value).__module__.split(".")[0] not in CLOSED_PACKAGES


def is_record(value: Any) -> bool:
    """Whether `value` is made anew from its content: a dataclass (a model output), or its own kind of list or dict."""
    if isinstance(value, (list, dict)):
        return type(value) not in (list, dict)
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def contents(value: Any) -> Hashable:
    """What the lists, dicts and records in `value` hold, by identity; a later answer differs if one was changed.

    Calls take these apart and make them anew, so a change of one would be lost; objects that hold tensors are not
    looked into.
    """
    if isinstance(value, (list, tuple)) or type(value) is dict or is_record(value):
        items = _items(value)
        return (Same(value), *[(key, Same(item), contents(item)) for key, item in items])
    return None


def _items(value: Any) -> list[tuple[Hashable, Any]]:
    """Keys, places and attribute names of a container, each with what stands there."""
    items: list[tuple[Hashable, Any]] = []
    if isinstance(value, (list, tuple)):
        items += enumerate(value)
    elif isinstance(value, Mapping):
        items += [(_key(key), item) for key, item in value.items()]
    return items + [(name, item) for name, item in _attributes(value) if not isinstance(value, Mapping)]


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """A record's fields that have a value, then its other attributes."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    names = dict.fromkeys([*(entry.name for entry in fields), *getattr(value, "__dict__", ())])
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


class _Walk:
    def __init__(self, opened: bool) -> None:
        self.opened = opened
        self.leaves: list[Any] = []
        self.seen: dict[int, int] = {}
        self.tensors: dict[int, int] = {}
        self.items = 0

    def visit(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            self.leaves.append(value)
            first = self.tensors.setdefault(id(value), len(self.tensors))
            return ("tensor", value.dtype, value.device, value.ndim, value.requires_grad, value.layout, first)
        kind = type(value)
        if kind is int or isinstance(value, SYMBOLIC):
            self.leaves.append(value)
            return ("int",)
        if kind is float:
            return ("float", repr(value))
        if isinstance(value, PRIMITIVES):
            return (kind, value)
        if kind in (tuple, list, torch.Size):
            return (kind, *[self.visit(item) for item in value])
        if kind is dict:
            return (kind, *[(_key(key), self.visit(item)) for key, item in value.items()])
        return self.visit_other(value, kind)

    def visit_other(self, value: Any, kind: type) -> Hashable:
        if isinstance(value, tuple):
            return ("tuple", kind, *[self.visit(item) for item in value])
        if isinstance(value, STATIC):
            return ("same", Same(value))
        if isinstance(value, (numbers.Number, range)):
            return (kind, value)
        if isinstance(value, slice):
            return ("slice", self.visit(value.start), self.visit(value.stop), self.visit(value.step))
        if is_record(value):
            return self.visit_record(value, kind)
        if isinstance(value, Mapping) and kind.__module__.split(".")[0] in ("collections", "transformers"):
            return ("mapping", kind, *[(_key(key), self.visit(item)) for key, item in value.items()])
        return self.visit_object(value, kind) if is_object(value) else ("same", Same(value))

    def visit_record(self, value: Any, kind: type) -> Hashable:
        if isinstance(value, Mapping) and dataclasses.is_dataclass(value):
            return ("output", kind, *[(key, self.visit(item)) for key, item in value.items()])
        attributes = tuple((name, self.visit(item)) for name, item in _attributes(value))
        if isinstance(value, list):
            return ("list", kind, attributes, *[self.visit(item) for item in value])
        if isinstance(value, dict):
            factory = Same(value.default_factory) if isinstance(value, defaultdict) else None
            items = tuple((_key(key), self.visit(item)) for key, item in value.items())
            return ("dict", kind, attributes, factory, items)
        return ("record", kind, *attributes)

    def visit_object(self, value: Any, kind: type) -> Hashable:
        if not self.opened:
            self.leaves.append(value)
            return ("held",)
        if id(value) in self.seen:
            return ("again", self.seen[id(value)])
        self.items += len(vars(value))
        if self.items > MAX_ITEMS:
            return ("same", Same(value))
        self.seen[id(value)] = len(self.seen)
        self.leaves.append(value)
        return ("object", kind, *[(name, self.visit(item)) for name, item in vars(value).items()])


def _key(key: Any) -> Hashable:
    return key if isinstance(key, (str, int, bool, float, bytes, type(None))) else Same(key)


def join(skeleton: Any, leaves: list[Any]) -> Any:
    """Rebuild a value from its skeleton and the leaves `split` gave, or others in their place.

    An opened object among the leaves is brought to the skeleton's state in place.
    """
    if skeleton[0] == "tensor":  # most often
        return leaves[0]
    return _Join(leaves, reuse=True).build(skeleton)


def rebuild(skeleton: Any, leaves: list[Any]) -> Any:
    """As `join`, but every opened object is made anew, with the same class and content."""
    return _Join(leaves, reuse=False).build(skeleton)


class _Join:
    def __init__(self, leaves: list[Any], *, reuse: bool) -> None:
        self.leaves = iter(leaves)
        self.objects: list[Any] = []
        self.reuse = reuse

    def build(self, skeleton: Any) -> Any:
        kind = skeleton[0]
        if kind in ("tensor", "int", "held"):
            return next(self.leaves)
        if isinstance(kind, type):
            return self.build_plain(kind, skeleton[1:])
        return BUILDERS[kind](self, skeleton)

    def build_plain(self, kind: type, rest: tuple[Any, ...]) -> Any:
        if kind in (tuple, list, torch.Size):
            return kind([self.build(item) for item in rest])
        if kind is dict:
            return {_unwrap(key): self.build(item) for key, item in rest}
        return rest[0]

    def build_object(self, skeleton: Any) -> Any:
        given = next(self.leaves)
        made = given if self.reuse else new_object(skeleton[1])
        self.objects.append(made)
        content = {name: self.build(item) for name, item in skeleton[2:]}
        vars(made).clear()
        vars(made).update(content)
        return made

    def build_output(self, skeleton: Any) -> Any:
        return skeleton[1](**{key: self.build(item) for key, item in skeleton[2:]})

    def build_record(self, skeleton: Any) -> Any:
        made = new_object(skeleton[1])
        self.set_attributes(made, skeleton[2:])
        return made

    def set_attributes(self, made: Any, attributes: tuple[Any, ...]) -> None:
        for name, item in attributes:
            object.__setattr__(made, name, self.build(item))

    def build_tuple(self, skeleton: Any) -> Any:
        kind, items = skeleton[1], [self.build(item) for item in skeleton[2:]]
        if hasattr(kind, "_fields"):
            return kind(*items)
        return kind(items) if hasattr(kind, "n_fields") else tuple.__new__(kind, items)

    def build_list(self, skeleton: Any) -> Any:
        kind, attributes, *items = skeleton[1:]
        made = kind.__new__(kind)
        self.set_attributes(made, attributes)
        list.extend(made, [self.build(item) for item in items])
        return made

    def build_dict(self, skeleton: Any) -> Any:
        kind, attributes, factory, items = skeleton[1:]
        made = kind.__new__(kind)
        if factory is not None:
            made.default_factory = factory.value
        self.set_attributes(made, attributes)
        base: Any = OrderedDict if isinstance(made, OrderedDict) else dict
        for key, item in items:
            base.__setitem__(made, _unwrap(key), self.build(item))
        return made

    def build_mapping(self, skeleton: Any) -> Any:
        return skeleton[1]([(_unwrap(key), self.build(item)) for key, item in skeleton[2:]])


def new_object(kind: Any) -> Any:
    """An empty instance of `kind`, to be given its content."""
    try:
        return object.__new__(kind)
    except TypeError:  # a class with C code at its base makes its own instances
        return kind.__new__(kind)


def _unwrap(key: Any) -> Any:
    return key.value if isinstance(key, Same) else key


BUILDERS: dict[str, Callable[[_Join, Any], Any]] = {
    "float": lambda joining, skeleton: float(skeleton[1]),
    "same": lambda joining, skeleton: skeleton[1].value,
    "again": lambda joining, skeleton: joining.objects[skeleton[1]],
    "slice": lambda joining, skeleton: slice(*[joining.build(item) for item in skeleton[1:]]),
    "tuple": _Join.build_tuple,
    "list": _Join.build_list,
    "dict": _Join.build_dict,
    "output": _Join.build_output,
    "record": _Join.build_record,
    "mapping": _Join.build_mapping,
    "object": _Join.build_object,
}
