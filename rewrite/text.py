"""Canonical text of a program: one line a node, the same in every process. Goldens, diffs and checks read it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from rewrite.program import Program, Region
from rewrite.tags import TAGS

_SYMBOL = re.compile(r"\b[su]\d+\b")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def program_text(program: Program) -> str:
    """Every region and every opaque module; sizes that vary are called s0, s1, ... in order of appearance.

    Two programs with the same text run the same operations on the same shapes, with the same tags.
    """
    text = "\n".join(region_text(region) for region in program.regions)
    text += "".join(f"\nopaque {opaque.path!r}: {opaque.reason}" for opaque in program.opaque)
    return _rename_symbols(text)


def region_text(region: Region) -> str:
    """A header that names the instances, then `%name = op target(args) : dtype[shape]  {tags}` for each node."""
    facts = [f"region {region.path!r} {region.class_name} x{len(region.instances)}: {', '.join(region.instances)}"]
    facts += ["  random"] if region.random else []
    facts += [f"  writes buffer {name}" for name in region.written_buffers]
    facts += [f"  changes input {name}" for name in region.mutated_inputs]
    return "\n".join([*facts, *(f"  {node_text(node)}" for node in region.graph.nodes)])


def node_text(node: fx.Node) -> str:
    """One node; sizes that vary keep the symbols of the capture."""
    tags = ", ".join(f"{key}={node.meta[key]!r}" for key in TAGS if key in node.meta)
    suffix = f"  {{{tags}}}" if tags else ""
    if node.op == "output":
        return f"return {argument_text(node.args[0])}{suffix}"
    kwargs = (f"{key}={argument_text(value)}" for key, value in node.kwargs.items())
    arguments = ", ".join([*(argument_text(arg) for arg in node.args), *kwargs])
    call = f"{node.op} {target_text(node.target)}"
    if arguments or node.op.startswith("call"):
        call += f"({arguments})"
    return f"%{node.name} = {call} : {value_text(node.meta.get('val'))}{suffix}"


def value_text(value: Any) -> str:
    """The type of a value: `float32[4, s0]`, and tuples and dicts of those; anything else by its class name."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {value_text(item)}' for key, item in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(value_text(item) for item in value)})"
    return "none" if value is None else type(value).__name__


def node_name(node: fx.Node) -> str:
    """How a node is named as an argument."""
    return f"%{node.name}"


def argument_text(argument: Any, show: Callable[[fx.Node], str] = node_name) -> str:
    """An argument of a node: other nodes as `show` has them, tensors by type, all else as Python writes it."""
    if isinstance(argument, fx.Node):
        return show(argument)
    if isinstance(argument, torch.Tensor):
        return value_text(argument)
    if isinstance(argument, slice):
        return ":".join("" if part is None else argument_text(part, show) for part in _slice_parts(argument))
    if isinstance(argument, Mapping):
        return f"{{{', '.join(f'{key!r}: {argument_text(item, show)}' for key, item in argument.items())}}}"
    if isinstance(argument, (tuple, list)):
        items = ", ".join(argument_text(item, show) for item in argument)
        return f"[{items}]" if isinstance(argument, list) else f"({items})"
    return target_text(argument) if callable(argument) else _plain_repr(argument)


def target_text(target: Any) -> str:
    """What a node calls: a function or class by its public name, a callable object as it prints itself."""
    if isinstance(target, str):
        return target
    short = str(getattr(target, "__name__", ""))
    for public in (torch, torch.nn.functional):
        if short and getattr(public, short, None) is target:
            return f"{public.__name__}.{short}"
    owner = getattr(target, "__self__", None)
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}.{target.__name__}"
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None or _prints_itself(target):
        return _plain_repr(target)
    module = getattr(target, "__module__", None)
    return f"{module}.{name}" if module else str(name)


def _prints_itself(target: Any) -> bool:
    """Whether a callable is an object with a `__repr__` of its own, which may tell more than its name."""
    if inspect.isroutine(target) or isinstance(target, type):
        return False
    return any("__repr__" in vars(base) for base in type(target).__mro__[:-1])


def _plain_repr(value: Any) -> str:
    """On one line, without memory addresses."""
    return " ".join(_ADDRESS.sub("", repr(value)).split())


def _slice_parts(argument: slice) -> Iterator[Any]:
    yield argument.start
    yield argument.stop
    if argument.step is not None:
        yield argument.step


def _rename_symbols(text: str) -> str:
    seen: dict[str, str] = {}
    lines = []
    for line in text.split("\n"):
        head, mark, types = line.rpartition(" : ")
        lines.append(head + mark + _SYMBOL.sub(lambda found: _symbol(found.group(), seen), types) if mark else line)
    return "\n".join(lines)


def _symbol(name: str, seen: dict[str, str]) -> str:
    return seen.setdefault(name, f"{name[0]}{len(seen)}")
