"""Which nodes are dear to compute again, and which are nearly free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from passes.nodes import function_name
from rewrite import KEEP, KEEP_STATE

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite import PassResult

FREE_LAYERS = ("Norm", "Dropout", "ELU", "GELU", "Sigmoid", "SiLU", "Tanh", "Softmax", "Softplus", "Hardswish", "Mish",
               "Identity", "Flatten", "Pad", "Shuffle", "Shrink", "Softsign", "Threshold", "Embedding",
               "Activation")  # fmt: skip
"""Parts of the class names of layers that cost little beside a matrix product."""

COSTLY_FUNCTIONS = ("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv",
                    "mv", "dot", "einsum", "bilinear", "tensordot", "scaled_dot_product_attention", "cdist", "lstm",
                    "gru", "rnn_tanh", "rnn_relu", "multi_head_attention_forward", "svd", "qr", "inv", "solve", "eigh",
                    "cholesky", "fft", "ifft", "rfft", "irfft", "grouped_mm", "_grouped_mm")  # fmt: skip
COSTLY_PARTS = ("conv", "apply_", "attention", "chunked_")
"""Parts of names: convolutions, and functions of somebody's own."""


def is_costly(node: Node) -> bool:
    """Whether running the node again takes matrix work, or nobody can say what it takes."""
    if node.op == "call_module":
        kind = node.meta.get("module_type")
        return kind is None or not kind.__module__.startswith("torch.nn") or not _is_free(kind.__name__)
    name = function_name(node)
    return name in COSTLY_FUNCTIONS or any(part in name for part in COSTLY_PARTS)


def _is_free(name: str) -> bool:
    return any(part in name for part in FREE_LAYERS)


def keep_costly(result: PassResult) -> None:
    """Of the nodes that a pass has tagged to be recomputed, keep the costly, and the masks of dropouts."""
    for node in _changed(result):
        if is_costly(node):
            node.meta[KEEP] = node.meta[KEEP_STATE] = True
        elif "ropout" in f"{function_name(node)} {getattr(node.meta.get('module_type'), '__name__', '')}":
            node.meta[KEEP_STATE] = True


def keep_frozen(result: PassResult) -> None:
    """Keep the costly values that no gradient goes through: what is frozen before them is never run again."""
    for node in _changed(result):
        if is_costly(node) and getattr(node.meta.get("val"), "requires_grad", None) is False:
            node.meta[KEEP] = node.meta[KEEP_STATE] = True


def _changed(result: PassResult) -> Iterator[Node]:
    """The nodes that the pass has tagged: not those that the model's author, or a pass before, has recomputed."""
    for change in result.changes:
        names = set(change.nodes)
        for region in result.program.regions:
            if change.path in region.instances:
                yield from (node for node in region.nodes() if node.name in names)
