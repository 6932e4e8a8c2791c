"""Find the frozen prefix of a model and tag it to be kept for each example, or say why it cannot be."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from passes.costly import is_costly
from passes.kept_frozen import kept_frozen
from passes.nodes import called_path, function_name, hint
from passes.prefix_cache import PrefixCache
from passes.prefix_settings import settings
from passes.prefix_weights import content
from rewrite import WITHIN, Change, Refusal, size_text

if TYPE_CHECKING:
    from torch.fx import Node

    from passes.prefix_store import Store
    from rewrite import Program, Region

ORDINARY = ("torch.nn.", "transformers.pytorch_utils.", "bitsandbytes.")
"""Packages whose layers draw no random numbers in eval mode."""


def cache_prefix(program: Program, store: Store) -> Change | Refusal | None:
    """Tag the frozen nodes of the model's own graph to run through a cache; None where they are tagged already."""
    region = next((each for each in program.regions if not each.path), None)
    if region is None:
        return Refusal("", "the frozen prefix is not cached: the model's own forward has no graph to cut it from")
    if any(WITHIN in node.meta for node in region.nodes()):
        return None
    group = [node for node in region.nodes() if node in kept_frozen(region)]
    dear = _dear(group, region)
    reason = "it does no matrix work" if not dear else _why_not(program, region, group) or _no_rows(group, dear)
    if reason:
        return Refusal("", f"the frozen prefix is not cached: {reason}")
    cache = _cache(program, region, group, dear, store)
    for node in group:
        node.meta[WITHIN] = cache
    size = sum(_row_bytes(node) for node in dear)
    summary = f"frozen prefix kept for each example: {', '.join(node.name for node in dear)}, {size_text(size)} a row"
    return Change("", summary, region.instances, tuple(node.name for node in group))


def _dear(group: list[Node], region: Region) -> list[Node]:
    """The values that leave the group and took matrix work or a weight."""
    costly: set[Node] = set()
    for node in group:
        reads = any(source.op == "get_attr" for source in node.all_input_nodes)
        weighs = node.op == "call_module" and any(True for _ in region.called(node).parameters())
        if is_costly(node) or reads or weighs or any(source in costly for source in node.all_input_nodes):
            costly.add(node)
    inside = set(group)
    return [node for node in group if node in costly and any(user not in inside for user in node.users)]


def _why_not(program: Program, region: Region, group: list[Node]) -> str:
    """What of the group must happen anew for each call; "" for nothing."""
    inside = set(group)
    for node in group:
        source = f" ({node.meta['source']})" if node.meta.get("source") else ""
        others = [each for each in node.all_input_nodes if each not in inside]
        if any(each.op not in ("placeholder", "get_attr") for each in others):
            return f"{node.name}{source} depends on a module without a graph"
        if node.meta.get("hooked"):
            return f"the hooks of {node.target} must fire"
        if node.meta.get("writes") or _moves_statistics(region, node):
            return f"{node.name}{source} changes a buffer or a value in place; eval_mode=True keeps batch norms still"
        for path, drawing in _drawing(program, region, node):
            return f"{path} draws random numbers{drawing}; hold the frozen part in eval mode with eval_mode=True"
    return ""


def _moves_statistics(region: Region, node: Node) -> bool:
    return node.op == "call_module" and any(path.startswith(f"{node.target}.") for path in region.written_buffers)


def _drawing(program: Program, region: Region, node: Node) -> Iterator[tuple[str, str]]:
    """Module path, and line, of what draws random numbers in a node, or in the graph it calls."""
    path = called_path(region, node) if node.op == "call_module" else node.meta.get("module_path", "")
    if node.meta.get("block"):
        for other in (each for each in program.regions if path in each.instances):
            for inner in other.nodes():
                yield from _drawing(program, other, inner)
    elif node.meta.get("random") and _draws_now(region, node):
        yield path, f" ({node.meta['source']})" if node.meta.get("source") else ""


def _draws_now(region: Region, node: Node) -> bool:
    """Whether a node that may draw does so in the mode it is in."""
    if node.op == "call_module":
        layers = list(region.called(node).modules())
        known = all(f"{type(layer).__module__}.".startswith(ORDINARY) for layer in layers)
        return not known or any(layer.training or "FractionalMaxPool" in type(layer).__name__ for layer in layers)
    if "dropout" in function_name(node):
        return node.kwargs.get("training", node.args[2] if len(node.args) > 2 else True) is not False
    return True


def _no_rows(group: list[Node], dear: list[Node]) -> str:
    """Why the values cannot be told apart by example; "" if they can."""
    batch = _batch(group)
    if batch is None:
        return "no input of it has a batch of any size as its first dimension"
    odd = next((node for node in dear if _first_size(node) != batch), None)
    return "" if odd is None else f"{odd.name} has no row for each example"


def _batch(group: list[Node]) -> str | None:
    """The size that the first dimension of the prefix's inputs shares."""
    sizes = [_first_size(source) for node in group for source in node.all_input_nodes if source.op == "placeholder"]
    return next((size for size in sizes if size is not None), None)


def _first_size(node: Node) -> str | None:
    """The name of a value's first dimension, if that may vary."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.ndim or not isinstance(value.shape[0], torch.SymInt):
        return None
    return str(value.shape[0])


def _row_bytes(node: Node) -> int:
    value = node.meta["val"]
    size = int(value.element_size())
    for length in value.shape[1:]:
        size *= hint(length)
    return size


def _cache(program: Program, region: Region, group: list[Node], dear: list[Node], store: Store) -> PrefixCache:
    batch = _batch(group)
    sources = dict.fromkeys(source for node in group for source in node.all_input_nodes)
    rows = [node.name for node in sources if node.op == "placeholder" and _first_size(node) == batch]
    paths = list(dict.fromkeys(str(node.target) for node in group if node.op == "call_module"))
    attributes = [str(node.target) for node in sources if node.op == "get_attr"]
    code = "\n".join((torch.__version__, *_lines(program, region, group)))
    modes = tuple(layer.training for path in paths for layer in region.captured.module.get_submodule(path).modules())
    names = tuple(node.name for node in dear)
    return PrefixCache(store, names, tuple(rows), tuple(paths), tuple(attributes), code, modes)


def _lines(program: Program, region: Region, nodes: list[Node]) -> Iterator[str]:
    """What the nodes do, the same in every process."""
    for node in nodes:
        what = node.target if isinstance(node.target, str) else function_name(node)
        held = getattr(node.target, "value", None)
        if held is not None:
            known = content(held) if isinstance(held, torch.Tensor) else repr(held).encode()
            what += hashlib.blake2b(known, digest_size=20).hexdigest()
        yield f"{node.name} {node.op} {what} {node.args} {node.kwargs}"
        if node.op != "call_module":
            continue
        path = called_path(region, node) if node.meta.get("block") else None
        graphs = [other for other in program.regions if path in other.instances]
        for other in graphs:
            yield from _lines(program, other, list(other.nodes()))
        if not graphs:
            yield from settings(region.called(node))
