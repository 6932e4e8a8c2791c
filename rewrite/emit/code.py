"""Python functions from graphs, with each line traceable to its node."""

from __future__ import annotations

import itertools
import linecache
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from rewrite import runtime
from rewrite.capture.captured import is_graded
from rewrite.recompute.replay import graded

_numbers = itertools.count()
_ASSIGNED = re.compile(r"^ {4}([A-Za-z_][A-Za-z_0-9]*)(?: : .*?)? = ")


def compile_graph(graph: fx.Graph, path: str) -> Callable[..., Any]:
    """A function `(module, *inputs)` that runs `graph`; `path` names the region its lines belong to."""
    written = graph.python_code("module")
    source = re.sub(r"def forward\(self(, )?", r"def forward(module\1", written.src, count=1)
    source = re.sub(r"(?m)^    this_module = .*$", "    this_module = module", source)
    for target in {str(node.target) for node in graph.nodes if node.op == "call_module"}:
        source = source.replace(f" = {_attribute(target)}(", f" = {_in_tables(target)}(")
    filename = f"<rewrite {next(_numbers)} {path or 'root'}>"
    scope = {
        name: value.function if isinstance(value, runtime.Named) else value for name, value in written.globals.items()
    }
    exec(compile(source, filename, "exec"), scope)
    names = {node.name for node in graph.nodes}
    lines: list[tuple[str, str] | None] = [None]
    for line in source.split("\n"):
        match = _ASSIGNED.match(line)
        lines.append((path, match.group(1)) if match and match.group(1) in names else None)
    runtime.SOURCES[filename] = tuple(lines)
    linecache.cache[filename] = (len(source), None, [f"{line}\n" for line in source.split("\n")], filename)
    function: Callable[..., Any] = scope["forward"]
    opens_spans = any(node.target in (runtime.set_grad_enabled, runtime.enter_autocast) for node in graph.nodes)
    return runtime.leaving_modes(function) if opens_spans else function


def copy_graded(part: fx.Graph, node: fx.Node, made: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Copy a node into code that runs with grad mode off, so that it computes what it does with it on."""
    if not is_graded(node):
        return part.node_copy(node, made.__getitem__)
    args, kwargs = fx.map_arg((node.args, node.kwargs), made.__getitem__)
    function: Any = part.get_attr(str(node.target)) if node.op == "call_module" else node.target
    copied = part.call_function(graded, (function, *args), kwargs)
    copied.meta = dict(node.meta)
    return copied


def _attribute(path: str) -> str:
    """How torch.fx writes the module at `path`."""
    written = "module"
    for name in path.split("."):
        written = f"{written}.{name}" if name.isidentifier() else f'getattr({written}, "{name}")'
    return written


def _in_tables(path: str) -> str:
    """The same through the tables of modules, whose attribute lookup is Python's."""
    return f"module{''.join(f'._modules[{name!r}]' for name in path.split('.'))}"
