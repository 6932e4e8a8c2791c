"""Take the arguments of a call apart, and put them together again.

A call is split into *leaves* (tensors, whole numbers, objects that hold tensors) and a hashable *skeleton* that says
how they stood. Tensors and whole numbers vary from call to call and are guarded apart; everything else in the
skeleton must be equal for two calls to be of one kind. Objects that hold tensors (a key-value cache) are opened too,
because a forward may change them.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

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


def is_object(value: Any) -> bool:
    """Whether `split` opens `value` as an object that may hold tensors."""
    if isinstance(value, (torch.Tensor, *PRIMITIVES, *STATIC)) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.split(".")[0] not in CLOSED_PACKAGES


def is_record(value: Any) -> bool:
    """Whether `value` is a dataclass, whose fields are its whole content (a model output)."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


class _Walk:
    def __init__(self, opened: bool) -> None:
        self.opened = opened
        self.leaves: list[Any] = []
        self.seen: dict[int, int] = {}
        self.items = 0

    def visit(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            self.leaves.append(value)
            return ("tensor", value.dtype, value.device, value.ndim)
        kind = type(value)
        if kind is int or isinstance(value, torch.SymInt):
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
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ("namedtuple", kind, *[self.visit(item) for item in value])
        if isinstance(value, STATIC):
            return ("same", Same(value))
        if isinstance(value, slice):
            return ("slice", self.visit(value.start), self.visit(value.stop), self.visit(value.step))
        if is_record(value):
            return self.visit_record(value, kind)
        if isinstance(value, Mapping) and kind.__module__.split(".")[0] in ("collections", "transformers"):
            return ("mapping", kind, *[(_key(key), self.visit(item)) for key, item in value.items()])
        return self.visit_object(value, kind) if is_object(value) else ("same", Same(value))

    def visit_record(self, value: Any, kind: type) -> Hashable:
        if isinstance(value, Mapping):
            return ("output", kind, *[(key, self.visit(item)) for key, item in value.items()])
        names = [entry.name for entry in dataclasses.fields(value)]
        return ("record", kind, *[(name, self.visit(getattr(value, name))) for name in names])

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
        made = given if self.reuse else object.__new__(skeleton[1])
        self.objects.append(made)
        content = {name: self.build(item) for name, item in skeleton[2:]}
        vars(made).clear()
        vars(made).update(content)
        return made

    def build_output(self, skeleton: Any) -> Any:
        return skeleton[1](**{key: self.build(item) for key, item in skeleton[2:]})

    def build_record(self, skeleton: Any) -> Any:
        made = object.__new__(skeleton[1])
        for name, item in skeleton[2:]:
            object.__setattr__(made, name, self.build(item))
        return made

    def build_mapping(self, skeleton: Any) -> Any:
        return skeleton[1]([(_unwrap(key), self.build(item)) for key, item in skeleton[2:]])


def _unwrap(key: Any) -> Any:
    return key.value if isinstance(key, Same) else key


BUILDERS: dict[str, Callable[[_Join, Any], Any]] = {
    "float": lambda joining, skeleton: float(skeleton[1]),
    "same": lambda joining, skeleton: skeleton[1].value,
    "again": lambda joining, skeleton: joining.objects[skeleton[1]],
    "slice": lambda joining, skeleton: slice(*[joining.build(item) for item in skeleton[1:]]),
    "namedtuple": lambda joining, skeleton: skeleton[1](*[joining.build(item) for item in skeleton[2:]]),
    "output": _Join.build_output,
    "record": _Join.build_record,
    "mapping": _Join.build_mapping,
    "object": _Join.build_object,
}
