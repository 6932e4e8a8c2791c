"""Which nodes are dear to compute again, and which are nearly free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from passes.nodes import function_name, made_bytes
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


RESULT_SAVED = ("softmax", "relu", "sigmoid", "tanh", "Softmax", "ReLU", "Sigmoid", "Tanh")
"""Functions and layers whose backward reads what they gave, and not what they were given."""
FACTORS = ("mul", "__mul__", "__rmul__", "div", "__truediv__", "truediv")
NOTHING_SAVED = (*FACTORS, "add", "__add__", "__radd__", "sub", "neg", "masked_fill", "view", "reshape", "transpose",
                 "permute", "contiguous", "unsqueeze", "squeeze", "flatten", "float", "to", "type",
                 "type_as")  # fmt: skip
"""Functions whose backward reads no tensor that they were given; it does of factors, unless one is a number."""


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
    """Of the nodes that a pass has tagged to be recomputed, keep the costly, and the masks of dropouts.

    Where all that is read of a costly value is what a softmax made of it, the softmax is kept in its place: its
    backward reads its result, which takes as many bytes, and nothing between is run again.
    """
    nodes = list(_changed(result))
    tagged = set(nodes)
    instead: dict[Node, Node] = {}
    for node in nodes:
        source = _made_from(node, tagged)
        if source is not None:
            instead[source] = node
    later = set(instead.values())
    for node in nodes:
        if node in instead:
            node.meta[KEEP_STATE] = True
        elif is_costly(node) or node in later:
            node.meta[KEEP] = node.meta[KEEP_STATE] = True
        elif "ropout" in f"{function_name(node)} {getattr(node.meta.get('module_type'), '__name__', '')}":
            node.meta[KEEP_STATE] = True


def _made_from(node: Node, tagged: set[Node]) -> Node | None:
    """The costly node of whose value nothing is read but what `node` gives, if that is no larger."""
    if _called_name(node) not in RESULT_SAVED or node.meta.get("writes"):
        return None
    source = _only_source(node)
    while source is not None and source in tagged and len(source.users) == 1 and not source.meta.get("writes"):
        if is_costly(source):
            return source if made_bytes(node) <= made_bytes(source) else None
        source = _only_source(source) if _called_name(source) in NOTHING_SAVED else None
    return None


def _called_name(node: Node) -> str:
    if node.op != "call_module":
        return function_name(node)
    return str(getattr(node.meta.get("module_type"), "__name__", ""))


def _only_source(node: Node) -> Node | None:
    """The one operand that a gradient of the node's own size goes on through, unless a factor is read for it."""
    if _called_name(node) in FACTORS and len(node.all_input_nodes) > 1:
        return None
    trained = [each for each in node.all_input_nodes if getattr(each.meta.get("val"), "requires_grad", False)]
    sources = [each for each in trained if made_bytes(each) == made_bytes(node)]
    return sources[0] if len(sources) == 1 else None


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
