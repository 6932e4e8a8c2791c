"""Which modules of a model are regions, leaves or plain containers, and which repeat one another."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
QUANTIZED_PACKAGES = ("bitsandbytes.", "torchao.")
LEAF_PACKAGES = ("torch.nn.", "torch.ao.", "bitsandbytes.", "torchao.", "transformers.pytorch_utils")
PRIMITIVES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_CPU = torch.device("cpu")


@dataclass
class Structure:
    """What capture knows of a module tree before it runs."""

    blocks: dict[str, Hashable] = field(default_factory=dict)
    """Path of each element of a repeated stack -> what it shares with the elements that can serve as one."""
    differing: dict[Hashable, set[tuple[str, str]]] = field(default_factory=dict)
    """Group -> (path below the block, attribute) of plain attributes that differ between its elements."""


def find_blocks(root: nn.Module) -> Structure:
    """Find the repeated stacks: lists of modules in which a class occurs twice or more."""
    structure = Structure()
    _descend(root, "", structure)
    return structure


def _descend(module: nn.Module, path: str, structure: Structure) -> None:
    taken = set(_stack_elements(module, path, structure)) if isinstance(module, CONTAINERS) else set()
    for name, child in module.named_children():
        if name not in taken:
            _descend(child, f"{path}.{name}".lstrip("."), structure)


def _stack_elements(stack: nn.Module, path: str, structure: Structure) -> Iterator[str]:
    """Names of the elements of `stack` that are blocks; enters them in `structure`."""
    classes: dict[type, list[tuple[str, nn.Module]]] = {}
    for name, child in stack.named_children():
        if next(child.children(), None) is not None and not isinstance(child, CONTAINERS):
            classes.setdefault(type(child), []).append((name, child))
    for kind, elements in classes.items():
        if len(elements) < 2 and not (isinstance(stack, nn.ModuleList) and len(stack) == 1):
            continue  # a list of one is a stack too: its block may be called many times
        groups: dict[Hashable, list[tuple[str, nn.Module]]] = {}
        for name, child in elements:
            groups.setdefault((path, kind, signature(child)), []).append((name, child))
        alone = all(len(members) == 1 for members in groups.values())
        if alone and any(find_blocks(child).blocks for _, child in elements):
            continue  # stages of different shape that hold the real stacks
        for group, members in groups.items():
            key = hash(group)
            structure.differing[key] = differing_attributes([child for _, child in members])
            for name, _ in members:
                structure.blocks[f"{path}.{name}".lstrip(".")] = key
                yield name


def signature(module: nn.Module) -> Hashable:
    """Class, parameters, buffers and children, all the way down; equal for blocks that differ in values only."""
    own = [_tensor_signature(name, tensor) for name, tensor in module._parameters.items()]
    own += [_tensor_signature(name, tensor) for name, tensor in module._buffers.items()]
    children = [(name, signature(child)) for name, child in module.named_children()]
    return (type(module), has_hooks(module), tuple(own), tuple(children))


def _tensor_signature(name: str, tensor: torch.Tensor | None) -> Hashable:
    if tensor is None:
        return (name, None)
    return (name, tensor.dtype, tensor.device, tuple(tensor.shape), tensor.requires_grad, type(tensor))


def differing_attributes(modules: list[nn.Module]) -> set[tuple[str, str]]:
    """Plain attributes (layer numbers, rates) whose values are not the same in all of `modules`."""
    first, *others = [plain_attributes(module) for module in modules]
    differing = set()
    for other in others:
        for key in first.keys() | other.keys():
            if key not in first or key not in other or not _same(first[key], other[key]):
                differing.add(key)
    return differing


def plain_attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Attributes of the module and all below it that are not torch's own book-keeping."""
    book_keeping = nn.Module().__dict__.keys() | {"forward", "train"}
    found: dict[tuple[str, str], Any] = {}
    for path, inner in module.named_modules():
        found |= {(path, name): value for name, value in vars(inner).items() if name not in book_keeping}
    return found


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return isinstance(one, PRIMITIVES) and bool(one == other)


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody registered a hook that fires when the module is called."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_leaf(module: nn.Module) -> bool:
    """Whether the module is called as it is: torch's own layers, quantized layers, transformers' Conv1D."""
    if isinstance(module, CONTAINERS):
        return False
    if isinstance(module, torch.jit.ScriptModule):
        return True
    kind = type(module)
    if is_quantized(module):
        return True
    return f"{kind.__module__}.".startswith(LEAF_PACKAGES) and not find_blocks(module).blocks


def is_quantized(module: nn.Module) -> bool:
    """Whether the module is a quantized layer, or made from one: it computes what an ordinary one does, on its side."""
    return any(f"{base.__module__}.".startswith(QUANTIZED_PACKAGES) for base in type(module).__mro__)


def path_below(path: str, root: str) -> str | None:
    """`path` as seen from the module at `root`; None when it is not below it."""
    if not root:
        return path
    if path == root:
        return ""
    return path[len(root) + 1 :] if path.startswith(root + ".") else None


def join_path(root: str, path: str) -> str:
    """The path of what stands at `path` below the module at `root`."""
    return f"{root}.{path}" if root and path else root or path


def members(module: nn.Module, path: str, structure: Structure) -> list[nn.Module]:
    """The modules whose forward is part of a region's graph: those below it, without the blocks among them."""
    found = [module]
    for name, child in module.named_children():
        below = join_path(path, name)
        if below not in structure.blocks:
            found += members(child, below, structure)
    return found


def flags(modules: list[nn.Module]) -> Hashable:
    """What a graph was captured for, of its region's members: training flags, hooks, requests to recompute, which of
    their parameters are trained, and these' dtypes and devices. Those on the meta device run as fakes of the CPU, and
    count as there."""
    training = modules[0].training
    states = [
        (module.training, bool(index) and has_hooks(module), bool(vars(module).get("gradient_checkpointing")))
        for index, module in enumerate(modules)
    ]
    odd = tuple((index, state) for index, state in enumerate(states) if state != (training, False, False))
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    kinds = {(p.dtype, _CPU if p.is_meta else p.device) for p in parameters}
    trained = [p.requires_grad for p in parameters]
    same = all(trained) or not any(trained)
    return (
        training,
        odd,
        next(iter(kinds)) if len(kinds) == 1 else frozenset(kinds),
        trained[:1] == [True] if same else tuple(trained),
    )
