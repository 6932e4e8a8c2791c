"""The part of a graph that depends on nothing trainable, and that may run before all that does.

A node is in the part if no weight it reads is trained, no input of the region that needs a gradient reaches it, and
running the whole part ahead of the rest would give the same: the order of random numbers, of writes in place and of
spans of autocast counts too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from passes.nodes import called_path, function_name, is_effect, storages

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite import Program, Region

INPUTS = ("placeholder", "get_attr")
OPENERS = ("set_grad_enabled", "enter_autocast")


class FrozenPart:
    """The frozen nodes of one region of a program."""

    def __init__(self, program: Program, region: Region, cut: Collection[Node] = (), *, in_order: bool = True) -> None:
        """`cut` are nodes that are to depend on nothing, though gradients go through them.

        With `in_order=False` frozen nodes count that draw random numbers after something trained has.
        """
        self.in_order = in_order
        self.region = region
        self.cut = frozenset(cut)
        self.holders = _around(program)
        self.all = list(region.nodes())
        self.clean = self._settled()
        """Every frozen node."""
        self.nodes = tuple(node for node in self.all if node in self.clean and self._may_be_tagged(node))
        """Those that call something, in graph order; not calls of modules in which others have code of their own."""

    def reads_weights(self) -> bool:
        """Whether a frozen weight is part of it: masks and positions alone are not worth a word."""
        return any(_weights(self.region, node) for node in self.nodes)

    def _settled(self) -> set[Node]:
        out: set[Node] = set()
        while True:
            clean = self._clean(out)
            drawn = self._drawn(clean) if self.in_order else []
            more = {*self._written(clean), *drawn, *self._split_spans(clean)} & clean
            if not more:
                return clean
            out |= more

    def _clean(self, out: set[Node]) -> set[Node]:
        """Nodes that no gradient and no trained weight reaches, but through those in `out`."""
        clean: set[Node] = set()
        for node in self.all:
            if node not in out and node.op != "output" and self._is_clean(node, clean):
                clean.add(node)
        return clean

    def _is_clean(self, node: Node, clean: set[Node]) -> bool:
        if node.op in INPUTS:
            return not node.meta.get("object") and not needs_grad(node)
        if function_name(node) in (*OPENERS, "exit_autocast"):
            return True  # with the span it opens or closes, see `_split_spans`
        if is_effect(node) or node.meta.get("object"):
            return False
        if node in self.cut:
            return True
        if any(source not in clean and not _is_size_of_input(node) for source in node.all_input_nodes):
            return False
        return not needs_grad(node) and not trains(self.region, node)

    def _written(self, clean: set[Node]) -> Iterable[Node]:
        """Nodes that touch memory which is written in place, and which what is trained touches too."""
        by_name = {node.name: node for node in self.all}
        written: set[Any] = set()
        for node in self.all:
            written |= storages(by_name[name] for name in node.meta.get("writes", ()) if name in by_name)
            written |= self._statistics(node)
        if not written:
            return ()
        touched = {node: self._touches(node) & written for node in self.all if node.op not in INPUTS}
        shared = {place for node, places in touched.items() if node not in clean for place in places}
        return [node for node, places in touched.items() if places & shared]

    def _touches(self, node: Node) -> set[Any]:
        return storages((node, *node.all_input_nodes)) | self._statistics(node)

    def _statistics(self, node: Node) -> set[Any]:
        """What stands for the buffers that a layer writes when it runs."""
        if node.op != "call_module":
            return set()
        below = f"{node.target}."
        return {path for path in self.region.written_buffers if path.startswith(below)}

    def _drawn(self, clean: set[Node]) -> list[Node]:
        """Nodes that draw random numbers after one that stays behind has."""
        behind, found = False, []
        for node in self.all:
            if node.meta.get("random"):
                behind |= node not in clean
                found += [node] if behind else []
        return found

    def _split_spans(self, clean: set[Node]) -> list[Node]:
        """The nodes of spans of no_grad and autocast that are not frozen from one end to the other."""
        found: list[Node] = []
        open_: list[int] = []
        for place, node in enumerate(self.all):
            name = function_name(node) if node.op == "call_function" else ""
            if name == "enter_autocast" or (name == "set_grad_enabled" and not node.args[0]):
                open_.append(place)
            elif (name == "exit_autocast" or name == "set_grad_enabled") and open_:
                span = self.all[open_.pop() : place + 1]
                found += span if any(each not in clean and each.op not in INPUTS for each in span) else []
            elif name in OPENERS or name == "exit_autocast":
                found.append(node)
        return found + [node for place in open_ for node in self.all[place:]]

    def _may_be_tagged(self, node: Node) -> bool:
        """Whether it calls something, and nothing in which modules see to themselves without its knowing of it."""
        if node.op in INPUTS:
            return False
        holds = node.op == "call_module" and called_path(self.region, node) in self.holders
        return not holds or bool(node.meta.get("block"))


def _around(program: Program) -> set[str]:
    """Paths of the modules that hold, or are, one with a graph of its own."""
    paths = {path for region in program.regions for path in region.instances} | set(program.metadata.get("blocks", ()))
    found: set[str] = set()
    for path in paths:
        while path and path not in found:
            found.add(path)
            path = path.rpartition(".")[0]
    return found


def _is_size_of_input(node: Node) -> bool:
    """Whether a node reads a size, which no gradient goes through, off an input."""
    is_size = node.op == "call_method" and node.target == "size"
    return is_size and all(source.op == "placeholder" for source in node.all_input_nodes)


def needs_grad(node: Node) -> bool:
    """Whether a gradient goes through what the node gives."""
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)


def _weights(region: Region, node: Node) -> list[nn.Parameter]:
    """The parameters that a node reads, itself or through the module it calls."""
    found = [source.meta.get("val") for source in node.all_input_nodes if source.op == "get_attr"]
    read = [value for value in found if isinstance(value, nn.Parameter)]
    return [*read, *region.called(node).parameters()] if node.op == "call_module" else read


def trains(region: Region, node: Node) -> bool:
    """Whether the node reads a weight that is trained."""
    return any(weight.requires_grad for weight in _weights(region, node))
