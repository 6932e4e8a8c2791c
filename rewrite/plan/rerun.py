"""Which nodes of a graph may be run again, and which are dropouts that run from a mask."""

from __future__ import annotations

from torch import fx, nn
from torch.nn import functional

from rewrite.capture.captured import REREADS

ROUTING = frozenset({"topk", "sort", "argsort", "kthvalue", "msort", "unique"})
"""Functions whose result may differ between two runs when values tie."""
EFFECTS = ("assign_", "new_object", "build_", "expect")
"""Prefixes of the functions that bring Python objects up to date, or make them."""
ONCE = "runs_once"
"""Key in the `meta` of a piece's node that stands outside every segment: its module has hooks, or no graph."""


def function_name(node: fx.Node) -> str:
    """Bare name of the function or method a node calls."""
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


def is_effect(node: fx.Node) -> bool:
    """Whether a node makes a Python object or brings one up to date, rather than computing a tensor."""
    return node.op == "call_function" and function_name(node).startswith(EFFECTS)


def changes_mode(node: fx.Node) -> int:
    """How far a node opens (1) or closes (-1) a span of no_grad or autocast."""
    name = function_name(node)
    if name == "set_grad_enabled":
        return -1 if node.args[0] else 1
    return {"enter_autocast": 1, "exit_autocast": -1}.get(name, 0)


def may_rerun(node: fx.Node) -> bool:
    """Whether the backward may run `node` again and get the same."""
    held = node.meta.get(ONCE) or node.meta.get("writes") or node.meta.get(REREADS)
    return not (held or function_name(node) in ROUTING)


def draws_mask(node: fx.Node, module: nn.Module) -> bool:
    """Whether `node` is a dropout whose mask can be kept as one byte an element."""
    if node.op == "call_module":
        return type(module.get_submodule(str(node.target))) is nn.Dropout
    return node.target is functional.dropout
