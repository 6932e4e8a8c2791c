"""Which nodes of a graph compute in low precision.

The algorithm of TensorFlow's auto_mixed_precision (grappler/optimizers/auto_mixed_precision.cc): products are
*allowed*; what must not be in low precision is *denied*, and carries that forward through what it leads to; what lies
between allowed nodes takes their colour; and operators that change no value take that of their neighbours. Here an
operator of the last kind takes it from its inputs, or from all of its users: taken from one user it would round what
the others read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from passes.islands import Islands, dataless, own_spans, statistics, written_storages
from passes.layers import has_weights, is_functional
from passes.nodes import function_name
from passes.operators import float_leaves, is_cast, is_wide, sources
from passes.precision_lists import ALLOW, CLEAR, DENY, INFER, colours

if TYPE_CHECKING:
    from torch.fx import Node

    from passes.levels import Level
    from rewrite import Region

LOSSES = ("loss", "Loss", "cross_entropy")
"""Parts of the names of losses, which are in single precision whatever the level."""
NORMS = ("norm", "Norm")
HALF = ("torch.float16", "torch.bfloat16")


@dataclass
class Colours:
    """What was decided for one region."""

    low: set[Node] = field(default_factory=set)
    """Nodes that take, and give, the low precision."""
    free: set[Node] = field(default_factory=set)
    """Nodes that take any precision: their results hold no floating-point numbers."""
    span: dict[Node, int] = field(default_factory=dict)


class Colouring:
    """Decides for one region."""

    def __init__(
        self, region: Region, level: Level, limits: tuple[float, float], kept: Collection[Node], residual: bool
    ) -> None:
        """`limits`: smallest normal and largest number of the low precision; `kept`: what the user keeps in fp32;
        `residual`: whether sums of a value and of what was computed from it stay in fp32."""
        self.region, self.level = region, level
        self.nodes = list(region.nodes())
        single, low, self.span = own_spans(region)
        islands = Islands(region, *limits)
        self.names = islands.names
        self.colour = {node: self._listed(node) for node in self.nodes}
        self.blocked = {node for node in self.nodes if node in low or self._is_fixed(node)}
        self.dataless = dataless(region)
        self.blocked |= self.dataless
        if residual:
            self.blocked |= self._residual_sums()
        if self._in_force:
            for node in islands.unsafe():
                self.colour[node] = DENY
        else:
            self.blocked |= statistics(region)
        for node in (*single, *kept):
            self.colour[node] = DENY

    def run(self) -> Colours:
        """The nodes in low precision."""
        denied = self._denied()
        inner = {node for node in self.nodes if self.colour[node] in (INFER, CLEAR)} - denied - self.blocked
        low = {node for node in self.nodes if self.colour[node] == ALLOW} - denied - self.blocked
        if not self._in_force:
            low |= inner
        after, before = self._after(low, inner), self._before(low, inner)
        wanted = after & before if self.level.patch_torch_functions else after | before
        low |= {node for node in wanted if self.colour[node] == INFER}
        self._flood(low, inner - low)
        self._settle_parts(low)
        free = {node for node in self.nodes if self.colour[node] and not float_leaves(node)}
        return Colours(low, free, self.span)

    # The colours to begin with.

    @property
    def _in_force(self) -> bool:
        """Whether the deny list is."""
        return self.level.patch_torch_functions or bool(self.level.keep_batchnorm_fp32)

    def _listed(self, node: Node) -> str:
        name = self.names[node]
        if is_cast(self.region, node):
            return CLEAR if self._is_plain_cast(node) else ""
        colour = colours().get(name, "")
        if colour != DENY or any(part in name for part in LOSSES):
            return colour
        if any(part in name for part in NORMS):
            return INFER if self.level.keep_batchnorm_fp32 is False else DENY
        return DENY if self._in_force else INFER

    def _is_plain_cast(self, node: Node) -> bool:
        """Whether a cast may give another dtype: of truth values, or of what is fp32 already."""
        value: Any = getattr(node.args[0], "meta", {}).get("val")
        kinds = ("torch.bool", "torch.float32") if self._in_force else ("torch.bool", "torch.float32", *HALF)
        return is_wide(node) and hasattr(value, "dtype") and str(value.dtype) in kinds

    def _is_fixed(self, node: Node) -> bool:
        """Whether a node gives what it gave when it was captured."""
        if node.op in ("placeholder", "output", "get_attr") or not is_wide(node):
            return True
        if node.op == "call_module":
            if node.meta.get("block") or node.meta.get("hooked"):
                return True
            return has_weights(self.region, node) and not is_functional(self.region, node)
        return bool(self._written & {leaf.untyped_storage()._cdata for leaf in float_leaves(node)})

    @property
    def _written(self) -> set[int]:
        if not hasattr(self, "_storages"):
            self._storages = written_storages(self.region)
        return self._storages

    def _residual_sums(self) -> set[Node]:
        """Sums of a value and of what products made of it."""
        through: dict[Node, set[Node]] = {}
        """Node -> the values that products stand between it and."""
        reached: dict[Node, set[Node]] = {}
        found: set[Node] = set()
        for node in self.nodes:
            given = sources(node)
            before = {node}.union(*(reached[source] for source in given))
            if self.colour[node] == ALLOW:
                through[node] = before - {node}
            else:
                through[node] = set().union(*(through[source] for source in given))
            reached[node] = before
            if self.names[node] == "add" and len(given) == 2:
                one, other = map(self._origin, given)
                if one in through[given[1]] or other in through[given[0]]:
                    found.add(node)
        return found

    def _origin(self, node: Node) -> Node:
        """The node whose values these are, behind what changes none."""
        while self.colour[node] == CLEAR and len(sources(node)) == 1:
            node = sources(node)[0]
        return node

    # The algorithm.

    def _denied(self) -> set[Node]:
        """Denied nodes, with what follows them up to the last that is not clear."""
        denied = {node for node in self.nodes if self.colour[node] == DENY}
        tainted = set(denied)
        for node in self.nodes:
            if self.colour[node] in (INFER, CLEAR) and any(source in tainted for source in sources(node)):
                tainted.add(node)
                if self.colour[node] == INFER:
                    denied.add(node)
        for node in reversed(self.nodes):
            if node in tainted and any(user in denied for user in node.users):
                denied.add(node)
        return denied

    def _after(self, low: set[Node], inner: set[Node]) -> set[Node]:
        found: set[Node] = set()
        for node in self.nodes:
            if node in inner and any(source in low or source in found for source in sources(node)):
                found.add(node)
        return found

    def _before(self, low: set[Node], inner: set[Node]) -> set[Node]:
        found: set[Node] = set()
        for node in reversed(self.nodes):
            if node in inner and any(user in low or user in found for user in node.users):
                found.add(node)
        return found

    def _flood(self, low: set[Node], inner: set[Node]) -> None:
        """Give clear nodes the colour of what they read, or of all that read them."""
        open_ = {node for node in inner if self.colour[node] == CLEAR}
        while True:
            taken = {node for node in open_ if self._takes(node, low)}
            if not taken:
                return
            low |= taken
            open_ -= taken

    def _takes(self, node: Node, low: set[Node]) -> bool:
        given = [source for source in sources(node) if source not in self.dataless]
        if given and all(source in low for source in given):
            return True
        readers = [user for user in node.users if user.op != "output" or float_leaves(node)]
        return bool(readers) and all(user in low for user in readers)

    def _settle_parts(self, low: set[Node]) -> None:
        """A part of a tuple has the precision of the tuple."""
        for node in self.nodes:
            whole = sources(node)[0] if function_name(node) == "getitem" and sources(node) else None
            if whole is not None and isinstance(whole.meta["val"], (tuple, list)):
                (low.add if whole in low else low.discard)(node)
