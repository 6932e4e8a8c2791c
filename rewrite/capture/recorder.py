"""Record the torch calls of one module's forward as an fx graph."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase

from rewrite import calls, runtime
from rewrite.capture import private
from rewrite.capture.questions import writes_in_place
from rewrite.capture.randomness import draws
from rewrite.capture.structure import join_path, path_below
from rewrite.capture.surroundings import surroundings
from rewrite.capture.symbols import Sizes

if TYPE_CHECKING:
    from rewrite.capture.session import Session

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
LITERALS = (int, float, *calls.PRIMITIVES, torch.memory_format)
NORMS = (_NormBase,)
MAX_VALUES = 20_000
"""Values in one graph; a forward that makes more runs as it is."""


class OpaqueError(BaseException):
    """No graph can stand for the forward of the module at `path`.

    Not an Exception: a forward that catches those must not catch this.
    """

    def __init__(self, path: str, reason: str, source: str = "") -> None:
        super().__init__(path, reason, source)
        self.path, self.reason, self.source = path, reason, source


@functools.cache
def tensor_methods() -> Mapping[Any, str]:
    """Method objects of `torch.Tensor` by identity, so that a recorded call prints as `x.view(...)`."""
    found: dict[Any, str] = {}
    for name in dir(torch.Tensor):
        method = getattr(torch.Tensor, name, None)
        if callable(method) and isinstance(
            method, (types.MethodDescriptorType, types.WrapperDescriptorType, types.FunctionType)
        ):
            found.setdefault(method, name)
    return found


class Recorder:
    """The graph of one region in the making."""

    def __init__(
        self, session: Session, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]
    ) -> None:
        self.session = session
        self.path = path
        self.graph = fx.Graph()
        self.sizes = Sizes(self.graph)
        self.nodes: dict[int, fx.Node] = {}
        self.keep: list[Any] = []
        self.objects: dict[int, tuple[fx.Node, Any]] = {}
        self.questions: list[tuple[fx.Graph, bool]] = []
        self.surroundings = surroundings()
        """Global settings, as the graph's own nodes have left them."""
        self.written: set[str] = set()
        self.in_segment = False
        """Whether a part runs that the model recomputes by itself."""
        self.parts = calls.split((args, kwargs))
        self._add_placeholders(names)

    def _add_placeholders(self, names: list[str]) -> None:
        for index, leaf in enumerate(self.parts.leaves):
            node = self.graph.placeholder(names[index] if index < len(names) else f"input_{index}")
            node.meta["val"] = leaf
            if isinstance(leaf, torch.Tensor):
                self.track(leaf, node)
                self.sizes.bind(node, leaf)
            elif isinstance(leaf, (int, torch.SymInt)):
                self.sizes.bind_number(node, leaf)
            else:
                node.meta["object"] = True
                self.objects[id(leaf)] = (node, self._state(leaf))
                self.keep.append(leaf)
        self.versions = [tensor_version(leaf) for leaf in self.parts.leaves]

    def track(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self.nodes[id(tensor)] = node
        self.keep.append(tensor)

    # Values to arguments of a node.

    def argument(self, value: Any) -> Any:
        """`value` as fx writes it: nodes for tensors, sizes and objects, the rest as it is."""
        if isinstance(value, torch.Tensor):
            return self.tensor_node(value)
        if isinstance(value, SYMBOLIC):
            return self.number(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*[self.argument(item) for item in value])
        if isinstance(value, (tuple, torch.Size)):
            return tuple(self.argument(item) for item in value)
        if type(value) is list:
            return [self.argument(item) for item in value]
        if type(value) is dict:
            return {key: self.argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if isinstance(value, LITERALS):
            return plain(value)
        return self.other_argument(value)

    def other_argument(self, value: Any) -> fx.Node:
        if calls.is_record(value):
            parts = calls.split(value, opened=False)
            leaves = [self.argument(leaf) for leaf in parts.leaves]
            return self.graph.call_function(runtime.Build(parts.skeleton, type(value).__name__), (leaves,))
        if calls.is_object(value):
            return self.object_node(value)
        if isinstance(value, numpy.ndarray):
            raise self.session.opaque(
                "its forward makes a tensor from numpy data, which a graph would hold as it is now"
            )
        if isinstance(value, (nn.Module, functools.partial, types.MethodType)) or getattr(value, "__closure__", None):
            raise self.session.opaque(f"its forward hands a {type(value).__name__} to a function of torch")
        return self.constant(value)

    def number(self, value: Any) -> Any:
        if isinstance(value, torch.SymBool):
            return bool(value)
        try:
            return self.sizes.write(value)
        except KeyError as error:
            raise self.session.opaque(str(error.args[0])) from error

    def tensor_node(self, tensor: torch.Tensor) -> fx.Node:
        node = self.nodes.get(id(tensor))
        if node is not None:
            return node
        names = self.session.tensor_names.get(id(tensor), ())
        below = [name for name in (path_below(name, self.path) for name in names) if name]
        if below:
            node = self.graph.create_node("get_attr", below[0], name=below[0].replace(".", "_"))
            node.meta.update(val=tensor, module_path=self.session.module_path())
            self.track(tensor, node)
            return node
        found = self.inside_object(tensor)
        if found is not None:
            return found
        if names or isinstance(tensor, private.FakeTensor):
            what = f"the tensor {names[0]!r}" if names else "a tensor"
            raise self.session.opaque(f"its forward uses {what} that does not come through its arguments")
        node = self.constant(tensor)
        self.track(tensor, node)
        return node

    def knows(self, value: Any) -> bool:
        """Whether every tensor in a result came about in this graph."""
        leaves = calls.split(value, opened=False).leaves
        return all(
            id(leaf) in self.nodes or id(leaf) in self.session.tensor_names or self.leaf_of_object(leaf) is not None
            for leaf in leaves
            if isinstance(leaf, private.FakeTensor)
        )

    def constant(self, value: Any) -> fx.Node:
        return self.graph.call_function(runtime.Constant(value), ())

    # Objects that hold tensors.

    def _state(self, value: Any) -> tuple[Any, tuple[int, ...]]:
        parts = calls.split_object(value)
        return parts.skeleton, tuple(id(leaf) if not isinstance(leaf, int) else leaf for leaf in parts.leaves)

    def leaf_of_object(self, tensor: torch.Tensor) -> tuple[fx.Node, int] | None:
        """The node of an object that a region called before put `tensor` into, and its place among the leaves."""
        for value in self.keep:
            if id(value) not in self.objects or not calls.is_object(value):
                continue
            leaves = calls.split_object(value).leaves
            place = next((index for index, leaf in enumerate(leaves) if leaf is tensor), None)
            if place is not None:
                return self.objects[id(value)][0], place
        return None

    def inside_object(self, tensor: torch.Tensor) -> fx.Node | None:
        """A node that reads a tensor out of the object that holds it."""
        found = self.leaf_of_object(tensor)
        if found is None:
            return None
        node = self.graph.call_function(runtime.read_leaf, found)
        node.meta.update(val=tensor, module_path=self.session.module_path())
        self.track(tensor, node)
        return node

    def object_node(self, value: Any, around: tuple[int, ...] = ()) -> fx.Node:
        """A node whose value is the object in its present state, the objects inside it included."""
        if id(value) not in self.objects:
            self.new_object(value)
        leaves = calls.split_object(value).leaves[1:]
        for leaf in leaves:
            if calls.is_object(leaf) and id(leaf) not in (*around, id(value)):
                self.object_node(leaf, (*around, id(value)))
        node, known = self.objects[id(value)]
        state = self._state(value)
        if known == state:
            return node
        content = [self.objects[id(leaf)][0] if id(leaf) in self.objects else self.argument(leaf) for leaf in leaves]
        node = self.graph.call_function(runtime.Assign(state[0], type(value).__name__), ([node, *content],))
        node.meta.update(val=value, module_path=self.session.module_path(), source=self.session.source())
        self.objects[id(value)] = (node, state)
        return node

    def new_object(self, value: Any) -> fx.Node:
        node = self.graph.call_function(runtime.new_object, (self.constant(type(value)),))
        self.objects[id(value)] = (node, None)
        self.keep.append(value)
        return node

    def refresh_objects(self) -> None:
        """After a call of a module with its own forward: the call has brought the real objects to their new state."""
        for value in list(self.keep):
            entry = self.objects.get(id(value))
            if entry is not None and entry[1] is not None:
                self.found_object(value, entry[0])

    def found_object(self, value: Any, node: fx.Node) -> None:
        """`node` gives an object that exists, in its present state, and through it the objects inside."""
        self.objects[id(value)] = (node, self._state(value))
        self.keep.append(value)
        for place, leaf in enumerate(calls.split_object(value).leaves):
            if place and calls.is_object(leaf) and id(leaf) not in self.objects:
                self.found_object(leaf, self.graph.call_function(runtime.read_leaf, (node, place)))

    def note_buffers(self, module: nn.Module, path: str) -> None:
        """Remember the statistics a called layer writes: its kernels change them without telling autograd."""
        for name, inner in module.named_modules():
            if isinstance(inner, NORMS) and inner.training and inner.track_running_stats:
                below = join_path(path_below(path, self.path) or "", name)
                self.written |= {f"{below}.{key}" for key, buffer in inner._buffers.items() if buffer is not None}

    def note_writes(self, node: fx.Node, versions: list[tuple[torch.Tensor, int]]) -> None:
        """Say which values a call has changed in place: `meta["writes"]` holds the names of their nodes."""
        written = [tensor for tensor, version in versions if tensor._version != version]
        if written:
            node.meta["writes"] = tuple(self.nodes[id(tensor)].name for tensor in written if id(tensor) in self.nodes)

    def note_written(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The same for `batch_norm` and `instance_norm` called as functions."""
        if getattr(func, "__name__", "") not in ("batch_norm", "instance_norm"):
            return
        for tensor in (*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")):
            for name in self.session.tensor_names.get(id(tensor), ()):
                below = path_below(name, self.path)
                if below:
                    self.written.add(below)

    # Recording.

    def record(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        versions: list[tuple[torch.Tensor, int]],
    ) -> None:
        """Append the call `func(*args, **kwargs) -> out`."""
        if len(self.keep) > MAX_VALUES:
            raise self.session.opaque(f"it makes over {MAX_VALUES} values: an unrolled loop too long for a graph")
        name = getattr(func, "__name__", "")
        if not has_tensor(out) and not changes_something(name):
            return
        arguments, keywords = self.argument(tuple(args)), self.argument(dict(kwargs))
        node = self.create(func, name, arguments, keywords)
        self.note_writes(node, versions)
        if draws(func, name, args, kwargs):
            node.meta["random"] = True
        self.finish(node, out)

    def create(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        if name in ("__get__", "__set__"):
            attribute = func.__self__.__name__  # type: ignore[attr-defined]
            target = getattr if name == "__get__" else setattr
            return self.graph.call_function(target, (args[0], attribute, *args[1:][: name == "__set__"]))
        if name == "__setitem__":
            return self.graph.call_function(operator.setitem, args)
        if name == "__getitem__":
            return self.graph.call_function(operator.getitem, args)
        method = tensor_methods().get(func)
        if method is not None:
            return self.graph.call_method(method, args, kwargs)
        return self.graph.call_function(func, args, kwargs)

    def call_module(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        below = path_below(path, self.path)
        assert below, f"{path} is not below {self.path}"
        arguments, keywords = self.argument(tuple(args)), self.argument(dict(kwargs))
        return self.graph.create_node("call_module", below, arguments, keywords, name=below.replace(".", "_"))

    def finish(self, node: fx.Node, out: Any, path: str | None = None) -> None:
        """Say what `node` gives, where it comes from, and which nodes read its parts."""
        node.meta["val"] = out
        node.meta["module_path"] = self.session.module_path() if path is None else path
        node.meta["source"] = self.session.source()
        if isinstance(out, torch.Tensor):
            self.track(out, node)
            self.bind_unbacked(node, out)
        elif isinstance(out, (tuple, list)):
            for index, item in enumerate(out):
                self.part(operator.getitem, node, index, item, path)
        elif isinstance(out, Mapping):
            for key, item in out.items():
                self.part(operator.getitem, node, key, item, path)
        elif calls.is_record(out):
            for field in vars(out):
                self.part(getattr, node, field, getattr(out, field), path)

    def part(self, reader: Callable[..., Any], node: fx.Node, key: Any, item: Any, path: str | None) -> None:
        if has_tensor(item):
            self.finish(self.graph.call_function(reader, (node, key)), item, path)
        elif calls.is_object(item) and not calls.is_record(item) and id(item) not in self.objects:
            reading = self.graph.call_function(reader, (node, key))
            reading.meta["object"] = True
            self.found_object(item, reading)

    def bind_unbacked(self, node: fx.Node, tensor: torch.Tensor) -> None:
        if any(isinstance(size, torch.SymInt) and not private.has_hint(size) for size in tensor.shape):
            self.sizes.bind(node, tensor)

    def output(self, out: Any) -> Any:
        """Close the graph; returns the skeleton of its result."""
        for value in [leaf for leaf in self.parts.leaves if calls.is_object(leaf)]:
            self.object_node(value)
        parts = calls.split(out, opened=False)
        node = self.graph.output([self.argument(leaf) for leaf in parts.leaves])
        node.meta["val"] = parts.leaves
        drop_unused_sizes(self.graph)
        return parts.skeleton

    def mutated_inputs(self) -> tuple[str, ...]:
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        found = []
        for node, leaf, version in zip(placeholders, self.parts.leaves, self.versions, strict=True):
            if tensor_version(leaf) != version:
                found.append(node.name)
        return tuple(found)


def plain(value: Any) -> Any:
    """A literal as generated code can write it: a number of numpy, or of an enum, as Python's own."""
    if isinstance(value, numpy.generic):
        return value.item()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    return value


def tensor_version(value: Any) -> int:
    """How often a tensor has been written; 0 for what does not count it."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def has_tensor(value: Any) -> bool:
    """Whether a result is, or holds, a tensor."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (tuple, list)):
        return any(has_tensor(item) for item in value)
    if isinstance(value, Mapping):
        return any(has_tensor(item) for item in value.values())
    return calls.is_record(value) and any(has_tensor(item) for item in vars(value).values())


def changes_something(name: str) -> bool:
    """Whether a call that gives no tensor matters all the same."""
    if name in ("__setitem__", "__set__", "backward", "register_hook", "retain_grad"):
        return True
    return writes_in_place(name)


SIZE_TARGETS = frozenset(
    {operator.add, operator.mul, operator.floordiv, operator.mod, operator.sub, operator.pow, operator.neg}
)


def drop_unused_sizes(graph: fx.Graph) -> None:
    """Erase arithmetic on sizes, and objects inside others, that nothing reads."""
    for node in reversed(list(graph.nodes)):
        is_size = (node.op == "call_method" and node.target == "size") or node.target in SIZE_TARGETS
        if (is_size or node.target is runtime.read_leaf) and not node.users and "val" not in node.meta:
            graph.erase_node(node)
