"""Where in a model a storage is made: module path, and the node of generated code that ran."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from torch import nn

from rewrite.memory.autograd import running_sequence_number


class Place(NamedTuple):
    """Where something was made; empty strings where that is not known."""

    module_path: str
    region: str
    node: str
    """Node name, or the operator's name where no generated code is on the stack."""


class ModulePaths:
    """The stack of modules whose forward is running, by path, and how often each ran."""

    def __init__(self, root: nn.Module) -> None:
        self._paths = {id(module): path for path, module in root.named_modules()}
        self.stack: list[str] = []
        self.calls: dict[str, int] = {}

    @property
    def current(self) -> str:
        return self.stack[-1] if self.stack else ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the stack while modules are called within the block. A module outside the tree changes nothing."""
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._paths.get(id(module))
            if path is None:
                return original(module, *args, **kwargs)
            self.calls[path] = self.calls.get(path, 0) + 1
            self.stack.append(path)
            try:
                return original(module, *args, **kwargs)
            finally:
                self.stack.pop()

        nn.Module.__call__ = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # type: ignore[method-assign]


class Places:
    """Finds the place of whatever runs now, in the forward and in the backward."""

    def __init__(self, modules: ModulePaths) -> None:
        self._modules = modules
        self._generated = generated_lines()
        self._made: dict[int, Place] = {}
        """The place that made each autograd node, by sequence number."""

    def now(self, op_name: str) -> Place:
        node = self._generated_node() if self._generated else None
        if node is not None:
            region, name = node
            return Place(self._modules.current or region, region, name)
        if self._modules.stack:
            return Place(self._modules.current, "", op_name)
        number = running_sequence_number()
        made = None if number is None else self._made.get(number)
        return Place("", "", op_name) if made is None else made

    def remember(self, number: int, place: Place) -> None:
        """Say that the autograd node with this sequence number was made at `place`."""
        self._made[number] = place

    def _generated_node(self) -> tuple[str, str] | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            lines = self._generated.get(frame.f_code.co_filename)
            if lines is not None and frame.f_lineno < len(lines):
                return lines[frame.f_lineno]
            frame = frame.f_back
        return None


def generated_lines() -> Mapping[str, tuple[tuple[str, str] | None, ...]]:
    """For each file of generated code, the (region path, node name) of each line; nothing before any is made."""
    runtime = sys.modules.get("rewrite.runtime")
    lines: Mapping[str, tuple[tuple[str, str] | None, ...]] = {} if runtime is None else runtime.SOURCES
    return lines
