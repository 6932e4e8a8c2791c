"""A piece of a graph as a function of its entry, with every weight it reads as an argument.

Layers of one operator are written out as that operator, so that their weights are tensors like any other; a module of
another kind (a quantized layer) is called as it is, with its floating-point parameters as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from passes.nodes import function_name
from passes.position_wise import DROPOUTS
from rewrite import ORIGIN

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite import Region

Source = fx.Node | str
"""What a piece reads beside its entry: a node of the graph around, or a path below the region's module."""
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""As `torch.nn.functional.linear`."""


class Piece:
    """The nodes `nodes` of a region, in graph order, as `run(entry, modules, tensors)`; gives the value of the last."""

    def __init__(self, region: Region, entry: Node, nodes: Sequence[Node]) -> None:
        self.region = region
        self.nodes = tuple(nodes)
        self.modules: list[str] = []
        self.tensors: list[Source] = []
        self._graph = fx.Graph()
        self._inside: dict[Node, Any] = {entry: self._graph.placeholder("entry")}
        self._product = self._graph.placeholder("product")
        self._modules = self._graph.placeholder("modules")
        self._tensors = self._graph.placeholder("tensors")
        for node in nodes:
            self._inside[node] = self._copied(node)
        self._graph.output(self._inside[nodes[-1]] if nodes else self._inside[entry])
        self._run: Callable[..., torch.Tensor] = fx.GraphModule({}, self._graph).forward

    def __call__(
        self, entry: torch.Tensor, modules: Sequence[nn.Module], tensors: Sequence[torch.Tensor], product: Product
    ) -> torch.Tensor:
        """Run it; `modules` and `tensors` as `arguments` gives them."""
        return self._run(entry, product, modules, tensors)

    def function(self) -> Callable[[torch.Tensor, Sequence[nn.Module], Sequence[torch.Tensor]], torch.Tensor]:
        """`run(entry, modules, tensors)`, by plain products."""
        run = self._run
        return lambda entry, modules, tensors: run(entry, functional.linear, modules, tensors)

    def arguments(self, before: Node) -> tuple[list[Node], list[Node]]:
        """Nodes before `before` that give the modules and the tensors."""
        tensors = [attribute(self.region, each, before) if isinstance(each, str) else each for each in self.tensors]
        return [attribute(self.region, path, before) for path in self.modules], tensors

    def _copied(self, node: Node) -> Any:
        if node.op == "call_module":
            return self._module(node)
        if node.op == "call_function" and node.target is functional.linear:
            bound = _linear_arguments(*node.args, **node.kwargs)
            return self._graph.call_function(called, (self._product, *[self._argument(each) for each in bound]))
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._argument)
        return self._graph.create_node(node.op, node.target, args, kwargs)

    def _argument(self, value: Any) -> Any:
        """What stands for an input of a node inside."""
        if not isinstance(value, fx.Node) or value in self._inside:
            return self._inside.get(value, value) if isinstance(value, fx.Node) else value
        return self._given(str(value.target) if value.op == "get_attr" else value)

    def _given(self, source: Source) -> Node:
        if source not in self.tensors:
            self.tensors.append(source)
        read = self._graph.call_function(_item, (self._tensors, self.tensors.index(source)))
        value = source.meta["val"] if isinstance(source, fx.Node) else None
        if isinstance(value, torch.Tensor) and value.dim() > 2:
            read = self._graph.call_function(torch.flatten, (read, 0, -2))  # the same for all rows, which stand in 2-D
        return read

    def _module(self, node: Node) -> Any:
        module, path = self.region.called(node), str(node.target)
        rows = self._argument(node.args[0])
        if type(module) is nn.Linear or isinstance(module, Conv1D):
            weight = self._given(f"{path}.weight")
            if isinstance(module, Conv1D):
                weight = self._graph.call_function(torch.t, (weight,))
            bias = None if module.bias is None else self._given(f"{path}.bias")
            return self._graph.call_function(called, (self._product, rows, weight, bias))
        if type(module) is nn.LayerNorm:
            weights = [getattr(module, name) is not None for name in ("weight", "bias")]
            given = [
                self._given(f"{path}.{name}") if has else None
                for name, has in zip(("weight", "bias"), weights, strict=True)
            ]
            return self._graph.call_function(functional.layer_norm, (rows, module.normalized_shape, *given, module.eps))
        if isinstance(module, DROPOUTS):
            return rows  # it is position-wise, so it drops nothing in the mode this graph is for
        names = [name for name, parameter in module.named_parameters() if parameter.is_floating_point()]
        values = [self._given(f"{path}.{name}") for name in names]
        self.modules.append(path)
        which = self._graph.call_function(_item, (self._modules, len(self.modules) - 1))
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._argument)
        return self._graph.call_function(call_with, (which, names, values, args, kwargs))


def called(product: Product, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product of rows and weights, by the function given."""
    return product(rows, weight, bias)


def call_with(
    module: nn.Module,
    names: Sequence[str],
    values: Sequence[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a module with some of its parameters replaced."""
    if not names:
        return module(*args, **kwargs)
    return torch.func.functional_call(module, dict(zip(names, values, strict=True)), args, kwargs)


def _item(values: Sequence[Any], place: int) -> Any:
    return values[place]


def _linear_arguments(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    return input, weight, bias


def attribute(region: Region, path: str, before: Node) -> Node:
    """A node before `before` that reads an attribute of the region's module: one that is there, or a new one."""
    for node in region.nodes():
        if node is before:
            break
        if node.op == "get_attr" and node.target == path:
            return node
    with region.graph.inserting_before(before):
        made = region.graph.create_node("get_attr", path, name=path.replace(".", "_"))
    owner, _, name = path.rpartition(".")
    found = getattr(region.captured.module.get_submodule(owner), name)
    made.meta.update(val=_fake(region, found), module_path=f"{region.path}.{owner}".strip("."))
    return made


def product_weights(region: Region, node: Node, before: Node) -> tuple[Any, Any, bool] | None:
    """Weight and bias of a product, and whether the weight stands as [in, out]; None for a layer of another kind."""
    if node.op == "call_module":
        module, path = region.called(node), str(node.target)
        if type(module) is not nn.Linear and not isinstance(module, Conv1D):
            return None
        bias = None if module.bias is None else attribute(region, f"{path}.bias", before)
        return attribute(region, f"{path}.weight", before), bias, isinstance(module, Conv1D)
    if node.target is functional.linear:
        _, weight, bias = _linear_arguments(*node.args, **node.kwargs)
        return weight, bias, False
    if function_name(node) == "addmm":
        return (node.args[2], node.args[0], True) if not node.kwargs else None
    return node.args[1], None, True


def _fake(region: Region, found: Any) -> Any:
    """A fake of a tensor, as those of the capture; anything else as it is."""
    if not isinstance(found, torch.Tensor):
        return found
    fakes: Iterator[Any] = (node.meta.get("val") for node in region.nodes())
    mode = next(value.fake_mode for value in fakes if hasattr(value, "fake_mode"))
    with mode:
        return torch.empty(found.shape, dtype=found.dtype).requires_grad_(found.requires_grad)


def replace_nodes(region: Region, made: Node, stands_for: Iterable[Node], like: Node) -> None:
    """Say of a node just made which nodes it stands for; its value and place are those of `like`."""
    made.meta.update({key: like.meta[key] for key in ("val", "module_path", "source") if key in like.meta})
    made.meta[ORIGIN] = tuple(node.name for node in stands_for)


def erase_unused(region: Region, nodes: Iterable[Node]) -> None:
    """Take out those of `nodes` that nothing reads any more, and the weights that only they read."""
    for node in sorted(nodes, key=list(region.nodes()).index, reverse=True):
        if not node.users:
            sources = list(node.all_input_nodes)
            region.graph.erase_node(node)
            for source in sources:
                if source.op == "get_attr" and not source.users:
                    region.graph.erase_node(source)
