"""Which operators treat every position alike and apart: what they give for a row depends on that row alone.

A row is what stands along the last dimension. The proof looks at what a node calls and at the shapes it is given; a
node without a proof is not position-wise, and `why_not` says so in words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from passes.nodes import called_path, function_name

if TYPE_CHECKING:
    from torch.fx import Node

    from rewrite import Region

POINTWISE = frozenset(
    """abs acos add asin atan bfloat16 celu clamp clamp_max clamp_min clip clone contiguous cos detach div double elu
    eq erf exp expm1 float floordiv ge gelu gt half hardsigmoid hardswish hardtanh identity le leaky_relu log log1p
    logsigmoid lt masked_fill maximum minimum mish mul ne neg pow reciprocal relu relu6 rsqrt rsub selu sigmoid sign
    silu sin softplus softsign sqrt square sub swish tanh to truediv true_divide type_as where
    __add__ __mul__ __sub__ __truediv__ __pow__ __neg__ __radd__ __rmul__ __rsub__ __rtruediv__""".split()  # noqa: SIM905 - a list of this length reads better so
)
"""Functions and methods that work element by element."""
CASTS = frozenset({"float", "double", "to", "type", "contiguous"})
"""Names under which a cast, or nothing at all, may stand."""
ALONG_LAST = frozenset("mean sum amax amin softmax log_softmax norm var std chunk split glu".split())  # noqa: SIM905
"""Functions that are position-wise when they work along the last dimension."""
ACTIVATIONS = (
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU, nn.LogSigmoid,
    nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.Sigmoid, nn.SiLU, nn.Softplus, nn.Softsign, nn.Tanh,
)  # fmt: skip
DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
LAST_NORMS = (nn.LayerNorm, nn.RMSNorm)
UNKNOWN = "is not known to treat each position by itself"
MIXERS = {
    "scaled_dot_product_attention": "attends from each position to others",
    "cumsum": "sums over the positions before",
    "cumprod": "multiplies over the positions before",
    "flip": "changes the order of positions",
    "roll": "changes the order of positions",
    "batch_norm": "takes its statistics over all positions",
    "instance_norm": "takes its statistics over all positions",
    "group_norm": "takes its statistics over many positions",
    "topk": "routes positions, and how many go where depends on all of them",
    "sort": "routes positions, and how many go where depends on all of them",
    "argsort": "routes positions, and how many go where depends on all of them",
    "gather": "collects positions, and which depends on all of them",
    "index_select": "collects positions, and which depends on all of them",
    "scatter_add": "collects positions",
    "index_add_": "collects positions",
    "bmm": "multiplies positions with one another",
    "baddbmm": "multiplies positions with one another",
    "dropout": "draws random numbers in the order of positions",
}
"""Functions that mix positions, and how."""


def why_not(region: Region, node: Node) -> str:
    """Why a node is not position-wise, as the rest of a sentence about it; "" when it is."""
    if node.meta.get("hooked"):
        return "carries hooks that must fire once"
    if node.op == "call_module":
        written = any(path.startswith(f"{node.target}.") for path in region.written_buffers)
        return _module_reason(region.called(node)) or ("writes a buffer whenever it runs" if written else "")
    if node.op not in ("call_function", "call_method"):
        return "is no operator"
    name = function_name(node)
    if node.meta.get("writes") or (name.endswith("_") and not name.endswith("__")):
        return "changes a tensor in place"
    return _function_reason(node, name)


def _function_reason(node: Node, name: str) -> str:
    if name in POINTWISE:
        return _pointwise_reason(node)
    if name in ("linear", "matmul", "__matmul__", "addmm"):
        return _product_reason(node, name)
    if name in ("layer_norm", "rms_norm"):
        shape = node.kwargs.get("normalized_shape", node.args[1] if len(node.args) > 1 else ())
        return "" if _length(shape) == 1 else "normalises over more than the last dimension"
    if name in ALONG_LAST:
        return "" if _along_last(node) else "works along another dimension than the last"
    if name == "getitem":
        return "" if isinstance(_value(node.args[0]), (tuple, list)) or _keeps_rows(node) else "picks positions"
    if name.startswith("conv"):
        return "is a convolution, which sees neighbouring positions"
    if name in MIXERS:
        return MIXERS[name]
    return UNKNOWN


def _module_reason(module: nn.Module) -> str:
    if isinstance(module, DROPOUTS):
        return "draws random numbers in the order of positions" if module.training and module.p > 0 else ""
    if isinstance(module, LAST_NORMS):
        return "" if len(module.normalized_shape) == 1 else "normalises over more than the last dimension"
    if isinstance(module, (nn.Linear, Conv1D, *ACTIVATIONS)):
        return ""
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return "takes its statistics over all positions"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "is a convolution, which sees neighbouring positions"
    if isinstance(module, nn.MultiheadAttention):
        return "attends from each position to others"
    return f"is a {type(module).__name__}, which is not known to treat each position by itself"


def _pointwise_reason(node: Node) -> str:
    """Operands must have the result's shape, or be the same for every row."""
    made = _value(node)
    if not isinstance(made, torch.Tensor):
        return "gives no tensor"
    for source in node.all_input_nodes:
        value = _value(source)
        if isinstance(value, torch.Tensor) and not (_same_rows(value, made) or is_shared(value)):
            return "combines positions of different shapes"
    return ""


def _same_rows(value: torch.Tensor, made: torch.Tensor) -> bool:
    return value.ndim == made.ndim and all(_equal(a, b) for a, b in zip(value.shape[:-1], made.shape[:-1], strict=True))


def is_shared(value: torch.Tensor) -> bool:
    """Whether an operand is the same for every row: all its dimensions but the last are 1."""
    return all(_equal(size, 1) for size in value.shape[:-1])


def _equal(one: Any, other: Any) -> bool:
    """Whether two sizes are equal for every batch and length; symbols are compared as they are written."""
    return str(one) == str(other)


def _product_reason(node: Node, name: str) -> str:
    operands = node.args[1:3] if name == "addmm" else node.args[:2]
    if node.kwargs.get("input") is not None or len(operands) < 2:
        return "is a product in a form that is not known"
    rows, matrix = (_value(operand) for operand in operands)
    if not isinstance(matrix, torch.Tensor) or not isinstance(rows, torch.Tensor) or matrix.ndim != 2:
        return "multiplies positions with one another"
    if not _is_constant(operands[1]):
        return "multiplies positions with one another"
    return ""


def _along_last(node: Node) -> bool:
    source = _value(node.args[0])
    place = {"chunk": 2, "split": 2}.get(function_name(node), 1)
    default = 0 if function_name(node) in ("chunk", "split") else -1 if function_name(node) == "glu" else None
    dim: Any = node.kwargs.get("dim", node.args[place] if len(node.args) > place else default)
    if isinstance(dim, (tuple, list)):
        dim = dim[0] if len(dim) == 1 else None
    if not isinstance(dim, int) or not isinstance(source, torch.Tensor):
        return False
    keeps = function_name(node) not in ("mean", "sum", "amax", "amin", "norm", "var", "std") or node.kwargs.get(
        "keepdim"
    )
    return dim == -1 and bool(keeps)


def _keeps_rows(node: Node) -> bool:
    """Whether an index takes a part of the last dimension and leaves all others whole."""
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return len(index) == 2 and index[0] is Ellipsis and isinstance(index[1], slice) and _plain(index[1])


def _plain(part: slice) -> bool:
    return all(bound is None or isinstance(bound, int) for bound in (part.start, part.stop, part.step))


def _length(shape: Any) -> int:
    return len(shape) if isinstance(shape, (tuple, list)) else 1


def _value(node: Any) -> Any:
    return node.meta.get("val") if hasattr(node, "meta") else node


def is_product(region: Region, node: Node) -> bool:
    """Whether a node multiplies rows by a matrix of weights."""
    if node.op == "call_module":
        return isinstance(region.called(node), (nn.Linear, Conv1D))
    return function_name(node) in ("linear", "matmul", "__matmul__", "addmm") and not why_not(region, node)


def data_inputs(node: Node) -> Iterator[Node]:
    """Inputs of a node that vary from row to row; the others are weights and what is made of weights alone."""
    return (source for source in node.all_input_nodes if not _is_constant(source))


def _is_constant(node: Any) -> bool:
    """Whether a node is made of weights alone."""
    if node.op == "get_attr":
        return True
    return node.op in ("call_function", "call_method") and all(map(_is_constant, node.all_input_nodes))


def told(region: Region, node: Node) -> str:
    """A node as a sentence names it."""
    place = f" ({node.meta['source']})" if node.meta.get("source") else ""
    if node.op == "call_module":
        return f"{type(region.called(node)).__name__} {called_path(region, node)!r}{place}"
    return f"{function_name(node)}{place}"
