"""Questions about data during a capture: which may be asked again before a graph is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from rewrite.capture.recorder import Recorder

YES_OR_NO = frozenset({"__bool__", "is_nonzero", "item", "__contains__", "equal", "allclose"})


def ask_inputs(
    recorder: Recorder, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any
) -> fx.Graph | None:
    """A graph from the region's inputs to the question the model asked; None when it cannot be asked again.

    Only yes-or-no questions whose answer follows from the inputs alone may be: the region's graph then serves calls
    with the same answer.
    """
    if func.__name__ not in YES_OR_NO or not isinstance(answer, bool):
        return None
    if any(isinstance(value, torch.Tensor) and id(value) not in recorder.nodes for value in (*args, *kwargs.values())):
        return None
    node = recorder.create(func, func.__name__, recorder.argument(tuple(args)), recorder.argument(dict(kwargs)))
    needed = _ancestors(node)
    asked = _extract(recorder.graph, needed, node) if all(map(_pure, needed)) else None
    recorder.graph.erase_node(node)
    return asked


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting.extend(current.all_input_nodes)
    return found


def _pure(node: fx.Node) -> bool:
    """Whether a node may be run twice, and reads neither parameters nor random numbers."""
    if node.op in ("get_attr", "call_module"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.meta.get("random"):
        return False
    return node.op == "placeholder" or not (writes_in_place(name) or name in ("setitem", "setattr"))


def writes_in_place(name: str) -> bool:
    """Whether a torch function of this name changes its first argument, by torch's naming."""
    return name.endswith("_") and not name.endswith("__")


def _extract(graph: fx.Graph, needed: set[fx.Node], result: fx.Node) -> fx.Graph:
    extracted = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node in needed:
            made[node] = extracted.node_copy(node, made.__getitem__)
    extracted.output(made[result])
    return extracted


def guess(func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """An answer nobody knows, so that a run on fakes can go on: false, zero."""
    name = func.__name__
    if name in ("__bool__", "is_nonzero", "equal", "allclose", "__contains__"):
        return False
    tensor = args[0]
    if name == "tolist":
        return torch.zeros([int(size) for size in tensor.shape]).to(tensor.dtype).tolist()
    if name in ("numpy", "__array__"):
        return torch.zeros([int(size) for size in tensor.shape]).to(tensor.dtype).numpy()
    return 0.0 if tensor.is_floating_point() and name != "__index__" else 0
