"""One line a node: where it stands, what it calls, what it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from rewrite.diff.kept import Kept
from rewrite.diff.model import NodeLine
from rewrite.program import RECOMPUTE, TAGS, Region, value_tensors
from rewrite.tags import STORE
from rewrite.weight_casts import cast_weight

CASTS = ("to", "type", "type_as", "float", "half", "bfloat16", "double")
NOTHING = Kept(0, (), "")


def node_line(region: Region, node: fx.Node, kept: Kept, mark: str = " ", action: str = "keep") -> NodeLine:
    """A line for `node` that keeps `kept` both before and after."""
    shape, dtype = (kept.shape, kept.dtype) if kept.bytes else value_type(node.meta.get("val"))
    return NodeLine(
        mark=mark,
        action=action if kept.bytes or mark != " " else "",
        name=node.name,
        label=node_label(region, node),
        shape=shape,
        dtype=dtype,
        before_bytes=kept.bytes,
        after_bytes=kept.bytes,
        source=node.meta.get("source", ""),
        segment=node.meta.get(RECOMPUTE),
        value_bytes=value_bytes(node.meta.get("val")),
        stored_bits=node.meta.get(STORE),
    )


def outside_line(name: str, kept: Kept, mark: str = " ") -> NodeLine:
    """A line for what a module without a graph keeps; `name` is as `kept_by_instance` made it."""
    return NodeLine(mark, "keep", name, name.replace(":", " "), kept.shape, kept.dtype, kept.bytes, kept.bytes)


def node_label(region: Region, node: fx.Node) -> str:
    """`mlp.gate_proj` for a called module, `mlp.mul` for a function called in `mlp`'s forward."""
    if node.op == "call_module":
        return str(node.target)
    if node.op in ("placeholder", "get_attr"):
        return str(node.target)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    below = _below(node.meta.get("module_path", region.path), region.path)
    name = str(name).strip("_")  # as in `__eq__`
    return f"{below}.{name}" if below else name


def _below(path: str, region: str) -> str:
    """`path` below the region's module, by depth: nodes name the instance they were captured in, split or not."""
    return ".".join(path.split(".")[len(region.split(".")) if region else 0 :])


def cast_from(node: fx.Node) -> str:
    """The dtype that a node casts from, if all it does is to give its one tensor in another floating-point dtype."""
    given = value_tensors([source.meta.get("val") for source in node.all_input_nodes])
    made = value_tensors(node.meta.get("val"))
    if not node.op.startswith("call") or len(given) != 1 or len(made) != 1:
        return ""
    both = given[0].is_floating_point() and made[0].is_floating_point()
    alike = both and _concrete_shape(given[0]) == _concrete_shape(made[0])
    return dtype_name(given[0]) if alike and _is_cast(node) and given[0].dtype != made[0].dtype else ""


def _is_cast(node: fx.Node) -> bool:
    return node.target is cast_weight or (node.op == "call_method" and node.target in CASTS)


def dtype_change(old: fx.Node, new: fx.Node) -> str:
    """The dtype of what a node gave, if it gives another floating-point one now."""
    before, after = value_tensors(old.meta.get("val")), value_tensors(new.meta.get("val"))
    changed = (
        dtype_name(was)
        for was, now in zip(before, after, strict=False)
        if was.dtype != now.dtype and was.is_floating_point() and now.is_floating_point()
    )
    return next(changed, "")


def dtype_name(tensor: torch.Tensor) -> str:
    """`float16`."""
    return str(tensor.dtype).removeprefix("torch.")


def value_type(value: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of the largest tensor in a node's value; sizes that vary by their size in the captured run."""
    tensors = value_tensors(value)
    if not tensors:
        return (), ""
    largest = max(tensors, key=_tensor_bytes)
    return _concrete_shape(largest), dtype_name(largest)


def value_bytes(value: Any) -> int:
    """Bytes of the tensors in a node's value."""
    return sum(_tensor_bytes(tensor) for tensor in value_tensors(value))


def _tensor_bytes(tensor: torch.Tensor) -> int:
    size = tensor.element_size()
    for length in _concrete_shape(tensor):
        size *= length
    return size


def _concrete_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(concrete_size(size) for size in tensor.shape)


def concrete_size(size: int | torch.SymInt) -> int:
    """A size as a number; one that depends on data and has none counts as 1."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return hint if isinstance(hint, int) else 1


def tags_of(node: fx.Node) -> Mapping[str, object]:
    """What passes decided about `node`."""
    return {key: node.meta[key] for key in TAGS if key in node.meta}
