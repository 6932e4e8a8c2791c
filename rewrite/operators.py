"""What a node calls, by one name however it is written, and where: how options and reports name an operator.

Loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite.program import Region

SYNONYMS = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "bmatmul": "matmul",
    "rtruediv": "div", "rmul": "mul", "radd": "add", "rmatmul": "matmul", "rpow": "pow", "iadd": "add", "isub": "sub",
    "imul": "mul", "itruediv": "div", "swapdims": "swapaxes", "moveaxis": "movedim", "repeat_kv": "repeat",
    "special_softmax": "softmax", "special_log_softmax": "log_softmax", "linalg_norm": "norm", "half_to_float": "float",
}  # fmt: skip


def operator_name(region: Region, node: Node) -> str:
    """`add` for `a + b`, `torch.add` and `a.add(b)`; `nn.Linear` for a layer of torch, the class name for another.

    Empty for what calls nothing.
    """
    if node.op == "call_module":
        kind = type(region.called(node))
        return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__
    if node.op not in ("call_function", "call_method"):
        return ""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "getattr":
        return str(node.args[1]) if len(node.args) > 1 else name
    bare = name.strip("_")
    return SYNONYMS.get(bare, bare)


def operator_path(region: Region, node: Node, instance: str) -> str:
    """Where an operator stands in one instance of its region, as selectors name it.

    `encoder.layer.3.attention.matmul` for a function called in a module's forward, the module's path for a module.
    """
    below = str(node.meta.get("module_path", region.path))[len(region.path) :].lstrip(".")
    if node.op == "call_module":
        return f"{instance}.{node.target}".strip(".")
    return ".".join(part for part in (instance, below, operator_name(region, node)) if part)
