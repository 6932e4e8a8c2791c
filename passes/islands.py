"""Parts of a graph that must compute in single precision, beyond the operators of the deny list: found by pattern.

- Attention scores from the first mask or scale after their product to the softmax: an additive mask of `finfo.min`
  and a negative score sum to -inf in half precision, and a row of those is NaN.
- Squares (of handwritten norms and GELUs), whose range is the square of what they are given.
- Constants that half precision rounds to zero (the `eps` of a norm) or to infinity.
- Routing: what decides a top-k, from the product that makes the scores on. Rounded scores change the choice.
- What is computed from whole numbers and buffers alone: positions, rotary angles, counts.
- Where the author has said so: `x.float()`, and spans of `autocast(enabled=False)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from passes.nodes import function_name, hint
from passes.operators import constants, float_leaves, is_cast, operator_name, sources
from passes.precision_lists import ALLOW, CLEAR, colours

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite import Region

SOFTMAX = frozenset({"softmax", "log_softmax", "softmin", "gumbel_softmax", "nn.Softmax", "nn.LogSoftmax"})
SCORE_STEPS = frozenset({"add", "sub", "mul", "div", "masked_fill", "where", "clamp", "maximum", "minimum", "tanh"})
ROUTING = frozenset({"topk", "sort", "argsort", "kthvalue"})
ROUTING_STEPS = SCORE_STEPS | SOFTMAX | {"sigmoid", "nn.Sigmoid", "exp", "neg", "sum"}
ARITHMETIC = frozenset({"add", "sub", "mul", "div", "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum",
                        "rsub", "pow"})  # fmt: skip

REDUCTIONS = frozenset({"mean", "sum", "var", "std", "norm", "amax", "amin", "logsumexp"})
"""What makes one number of many, in the place of the last dimension if that is kept."""


class Islands:
    """The nodes of one region that stay in single precision, by what they do."""

    def __init__(self, region: Region, smallest: float, largest: float) -> None:
        """`smallest` normal and `largest` number of the low precision."""
        self.region = region
        self.names = {node: operator_name(region, node) for node in region.nodes()}
        self.smallest, self.largest = smallest, largest

    def unsafe(self) -> set[Node]:
        """Nodes whose numbers do not fit, and that lead astray what follows."""
        nodes = list(self.region.nodes())
        found = {node for node in nodes if self._is_square(node) or self._has_odd_constant(node)}
        found |= {node for node in nodes if self._asks_for_single(node)}
        for node in nodes:
            if self.names[node] in SOFTMAX:
                found |= set(self._steps_before(node, SCORE_STEPS))
            if self.names[node] in ROUTING and self._decides(node):
                found |= set(self._steps_before(node, ROUTING_STEPS, products=True))
        return found

    def _asks_for_single(self, node: Node) -> bool:
        return is_cast(self.region, node) and self.names[node] == "float" and bool(sources(node))

    def _is_square(self, node: Node) -> bool:
        return self.names[node] == "mul" and len(node.args) > 1 and node.args[0] is node.args[1]

    def _has_odd_constant(self, node: Node) -> bool:
        if self.names[node] not in ARITHMETIC or not float_leaves(node):
            return False
        values = [abs(value) for value in constants(node) if value and math.isfinite(value)]
        return any(value < self.smallest or value > self.largest for value in values)

    def _steps_before(self, node: Node, steps: frozenset[str], *, products: bool = False) -> Iterator[Node]:
        """What stands between a node and the products before it; with `products`, these too."""
        seen: set[Node] = set()
        open_ = list(sources(node))
        while open_:
            here = open_.pop()
            colour = colours().get(self.names[here], "")
            if here in seen or not (self.names[here] in steps or colour == CLEAR or is_cast(self.region, here)):
                if products and here not in seen and colour == ALLOW:
                    yield here
                continue
            seen.add(here)
            open_ += sources(here)
            if self.names[here] in steps:
                yield here

    def _decides(self, node: Node) -> bool:
        """Whether what a sort or top-k gives is used in the graph, not just handed out."""
        return any(user.op != "output" for user in node.users)


def dataless(region: Region) -> set[Node]:
    """Nodes whose numbers come from whole numbers, buffers and constants alone."""
    found: set[Node] = set()
    for node in region.nodes():
        if node.op == "get_attr":
            value = node.meta.get("val")
            if type(value).__name__ != "Parameter" and not getattr(value, "requires_grad", False):
                found.add(node)
        elif node.op in ("call_function", "call_method") and float_leaves(node) and not node.meta.get("random"):
            given = sources(node)
            if not _of_truth_values(region, node) and found.issuperset(given):
                found.add(node)
    return found


def _of_truth_values(region: Region, node: Node) -> bool:
    """Whether a node makes numbers of truth values, which any precision holds."""
    source = node.args[0] if node.args else None
    value = source.meta.get("val") if is_cast(region, node) and hasattr(source, "meta") else None  # type: ignore[union-attr]
    return str(getattr(value, "dtype", "")) == "torch.bool"


def statistics(region: Region) -> set[Node]:
    """Statistics of rows, as of a norm written by hand: what a reduction that keeps its dimension gives, and what is
    made of such numbers alone. They take next to no bytes, and the backward of their roots multiplies them up."""
    found: set[Node] = set()
    for node in region.nodes():
        given, made = sources(node), float_leaves(node)
        if not node.op.startswith("call") or not given or len(made) != 1 or not _is_column(made[0]):
            continue
        reduces = operator_name(region, node) in REDUCTIONS and not _is_column(float_leaves(given[0])[0])
        if reduces or found.issuperset(given):
            found.add(node)
    return found


def _is_column(value: Any) -> bool:
    return value.dim() > 1 and hint(value.shape[-1]) == 1


def own_spans(region: Region) -> tuple[set[Node], set[Node], dict[Node, int]]:
    """Nodes in the author's spans of `autocast(enabled=False)`, and of `autocast(enabled=True)`; and for every node
    the number of the innermost span of autocast or grad mode it stands in."""
    single: set[Node] = set()
    low: set[Node] = set()
    place: dict[Node, int] = {}
    stack: list[tuple[Any, bool]] = []
    grad, count = [0], 0
    numbers = {(): 0}
    for node in region.nodes():
        name = function_name(node)
        if name == "enter_autocast":
            stack.append((node, bool(node.args[2])))
        elif name == "exit_autocast":
            stack = [entry for entry in stack if entry[0] is not node.args[0]]
        elif name == "set_grad_enabled":
            count += 1
            grad = [*grad, count] if not node.args[0] else grad[:-1] or [0]
        state: Any = (*[entry[0].name for entry in stack], *grad)
        place[node] = numbers.setdefault(state, len(numbers))
        if stack:
            (low if stack[-1][1] else single).add(node)
    return single, low, place


def written_storages(region: Region) -> set[int]:
    """Storages that some node of the graph writes in place."""
    by_name = {node.name: node for node in region.nodes()}
    written: Iterable[Node] = (by_name[name] for node in region.nodes() for name in node.meta.get("writes", ()))
    return {leaf.untyped_storage()._cdata for node in written for leaf in float_leaves(node)}
