"""Whether a region's code runs nobody's code but torch's and ours: then nothing changes a module on the way.

What serves its blocks can be looked up for all of them before the first one runs, which is cheaper than one by one:
what the operators between them need of a processor's caches is large.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx
from torch.nn.modules import module as hooks

from rewrite import runtime
from rewrite.capture.structure import join_path
from rewrite.program import Region

KNOWN = frozenset({"torch", "rewrite", "passes", "operator", "_operator", "builtins", "math", "einops"})
"""Libraries that hold no module's state."""


def is_quiet(region: Region, blocks: Collection[str]) -> bool:
    """Whether only torch's operators and layers run in the code of `region`, and those `blocks`, by path."""
    return all(_is_known(region, node, blocks) for node in region.graph.nodes)


def hears_all() -> bool:
    """Whether somebody's hook runs at every call of any module."""
    return bool(hooks._global_forward_hooks or hooks._global_forward_pre_hooks)


def _is_known(region: Region, node: fx.Node, blocks: Collection[str]) -> bool:
    if node.op == "call_module":
        path = join_path(region.path, str(node.target))
        return path in blocks or all(_home(type(layer)) == "torch" for layer in region.called(node).modules())
    if node.op != "call_function":
        return True
    return not isinstance(node.target, (runtime.ApplyFunction, runtime.Expect)) and _home(node.target) in KNOWN


def _home(function: Any) -> str:
    return str(getattr(function, "__module__", "") or "torch").split(".")[0]
