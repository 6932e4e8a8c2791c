"""Questions about single nodes of a graph: what one calls, where, and what it gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite import Region

ROUTING = frozenset({"topk", "sort", "argsort", "kthvalue", "msort", "unique"})
"""Functions whose result may differ between two runs when values tie: their value is kept."""
EFFECTS = ("assign_", "new_object", "build_", "expect")
"""Prefixes of the functions that bring Python objects up to date: never part of a recompute."""


def function_name(node: Node) -> str:
    """Bare name of the function or method a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def called_path(region: Region, node: Node) -> str:
    """Absolute path of the module that a `call_module` node calls, for the region's first instance."""
    return f"{region.path}.{node.target}".lstrip(".")


def path_in(node: Node, region: Region, instance: str) -> str:
    """Module path of a node as the given instance of its region sees it."""
    path: str = node.meta.get("module_path", region.path)
    if node.op == "call_module":
        path = f"{region.path}.{node.target}".lstrip(".")
    return instance + path[len(region.path) :] if region.path else path


def mode_change(node: Node) -> int:
    """How far a node opens (1) or closes (-1) a span of no_grad or autocast."""
    name = function_name(node)
    if name == "set_grad_enabled":
        return -1 if node.args[0] else 1
    return {"enter_autocast": 1, "exit_autocast": -1}.get(name, 0)


def is_effect(node: Node) -> bool:
    """Whether a node brings a Python object up to date rather than computing a tensor."""
    return node.op == "call_function" and function_name(node).startswith(EFFECTS)


def storages(nodes: Iterable[Node]) -> set[int]:
    """Identities of the storages behind the fake values of `nodes`."""
    values = (tensor for node in nodes for tensor in tensors_of(node.meta.get("val")))
    return {tensor.untyped_storage()._cdata for tensor in values if str(tensor.layout) == "torch.strided"}


def tensors_of(value: Any) -> Iterator[Any]:
    """The tensors in a node's value."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)


def made_bytes(node: Node) -> int:
    """Bytes of the tensors a node gives, for the example inputs."""
    made = tensors_of(node.meta.get("val"))
    return sum(math.prod(map(hint, tensor.shape)) * tensor.element_size() for tensor in made)


def hint(size: Any) -> int:
    """A size for the example inputs."""
    hint = getattr(getattr(size, "node", None), "hint", size)
    return int(hint) if hint is not None else 1


def takes_object(node: Node) -> bool:
    """Whether a call is given a Python object that it may change, such as a key-value cache."""
    makers = ("assign_", "new_object")
    return any(
        source.meta.get("object") or (source.op == "call_function" and function_name(source).startswith(makers))
        for source in node.all_input_nodes
    )
