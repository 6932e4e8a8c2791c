"""Whether a region's code runs nobody's code but torch's and ours: then nothing changes a module on the way.

What serves its blocks can be looked up for all of them before the first one runs, which is cheaper than one by one:
what the operators between them need of a processor's caches is large.
"""

from __future__ import annotations

import types
from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules import module as hooks

from rewrite import runtime
from rewrite.capture.structure import join_path
from rewrite.program import Region

KNOWN = frozenset({"torch", "rewrite", "passes", "operator", "_operator", "builtins", "math", "einops"})
"""Libraries that hold no module's state."""
PLAIN = (types.FunctionType, types.BuiltinFunctionType, type(torch.Tensor.add), type(torch.add))
"""Kinds of functions that are what they look like: operators that somebody has added to torch are of another."""


def is_quiet(region: Region, blocks: Collection[str]) -> bool:
    """Whether only torch's operators and layers run in the code of `region`, and those `blocks`, by path."""
    return all(_is_known(region, node, blocks) for node in region.graph.nodes)


def alone() -> bool:
    """Whether nobody listens to what any module or operator does: by hooks on all modules or tensors, or by a mode."""
    return not (
        hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or torch._C._autograd._top_saved_tensors_default_hooks(True)
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    )


def _is_known(region: Region, node: fx.Node, blocks: Collection[str]) -> bool:
    if node.op == "call_module":
        return join_path(region.path, str(node.target)) in blocks or _is_torchs(region.called(node))
    if node.op != "call_function":
        return True
    target: Any = node.target
    if isinstance(target, runtime.ApplyFunction):
        return _home(target.function) in KNOWN
    ours = _home(type(target)) == "rewrite" and not isinstance(target, runtime.Expect)
    return ours or (isinstance(target, PLAIN) and _home(target) in KNOWN)


def _is_torchs(layer: nn.Module) -> bool:
    """Whether a layer is torch's alone: nothing is below it, and it holds no function of somebody else's."""
    return _home(type(layer)) == "torch" and not layer._modules and not any(map(callable, vars(layer).values()))


def _home(function: Any) -> str:
    return str(getattr(function, "__module__", "") or "torch").split(".")[0]
