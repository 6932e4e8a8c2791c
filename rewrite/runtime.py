"""What generated code calls, and where its lines come from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from rewrite import calls
from rewrite.errors import RewriteError
from rewrite.identity import present

SOURCES: dict[str, tuple[tuple[str, str] | None, ...]] = {}
"""File name of a generated function -> for each line number, (path of the region's first instance, node name)."""


class Constant:
    """A value a graph holds: `constant()` gives it back, or what stands in its place while a step is measured."""

    __module__ = "rewrite.runtime"

    def __init__(self, value: Any) -> None:
        self.value = value
        self.__name__ = self.__qualname__ = "constant"

    def __call__(self) -> Any:
        return present(self.value)

    def __repr__(self) -> str:
        return f"constant({self.value!r})"


class Build:
    """Make a record (a model output, a dataclass) from its leaves."""

    __module__ = "rewrite.runtime"

    def __init__(self, skeleton: Any, label: str) -> None:
        self.skeleton = skeleton
        self.__name__ = self.__qualname__ = f"build_{label}"

    def __call__(self, leaves: list[Any]) -> Any:
        return calls.join(self.skeleton, leaves)


class Assign(Build):
    """Bring an object that holds tensors (a key-value cache) to a state, in place; returns the object."""

    __module__ = "rewrite.runtime"

    def __init__(self, skeleton: Any, label: str) -> None:
        super().__init__(skeleton, label)
        self.__name__ = self.__qualname__ = f"assign_{label}"


def new_object(kind: type) -> Any:
    """An empty instance of `kind`, to be given its content by `Assign`."""
    return calls.new_object(kind)


def read_leaf(value: Any, place: int) -> torch.Tensor:
    """The tensor at `place` among the leaves of an object."""
    leaf: torch.Tensor = calls.split_object(value).leaves[place]
    return leaf


def set_grad_enabled(enabled: bool) -> None:
    """Grad mode from here on, until the next call: `torch.no_grad()` of the original, unrolled."""
    torch._C._set_grad_enabled(enabled)


_modes = threading.local()
"""The autocast spans that generated code has entered and not left, by thread."""


def enter_autocast(device: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool) -> torch.autocast:
    """Autocast from here on, until `exit_autocast` of the result: `with torch.autocast(...)`, unrolled."""
    context = torch.autocast(device, dtype, enabled, cache_enabled)
    context.__enter__()
    _entered().append(context)
    return context


def exit_autocast(context: torch.autocast) -> None:
    """The end of a span of autocast."""
    _entered().remove(context)
    context.__exit__(None, None, None)


def _entered() -> list[torch.autocast]:
    if not hasattr(_modes, "entered"):
        _modes.entered = []
    entered: list[torch.autocast] = _modes.entered
    return entered


def leaving_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose unrolled spans of no_grad and autocast end also when an error leaves it."""

    def run(*args: Any) -> Any:
        enabled, depth = torch.is_grad_enabled(), len(_entered())
        try:
            return function(*args)
        except BaseException:
            while len(_entered()) > depth:
                _entered().pop().__exit__(None, None, None)
            set_grad_enabled(enabled)
            raise

    return run


class ApplyFunction:
    """Call a custom `torch.autograd.Function`, with its own backward."""

    __module__ = "rewrite.runtime"

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = f"apply_{function.__name__}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


class Named:
    """A callable under a name that reads well in generated code."""

    __module__ = "rewrite.runtime"

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Kept:
    """Call a function, method or layer outside the recompute: what it saves for its backward stays saved."""

    __module__ = "rewrite.runtime"

    def __init__(self, op: str, target: Any) -> None:
        self.function: Callable[..., Any] | None = target if op == "call_function" else None
        self.method = "__call__" if op == "call_module" else str(target)
        self.__name__ = self.__qualname__ = f"kept_{getattr(target, '__name__', target)}".replace(".", "_")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _same):
            if self.function is not None:
                return self.function(*args, **kwargs)
            return getattr(args[0], self.method)(*args[1:], **kwargs)


def copied(value: Any) -> Any:
    """A kept value as it is now: what follows may write to it."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return [copied(item) for item in value] if isinstance(value, (tuple, list)) else value


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def this_module() -> Any:
    """Stands for the region's module itself; `compile_graph` puts the module in its place."""
    raise AssertionError("compile_graph replaces every call of this function")


class Expect:
    """Check that a module without a graph returned what the graph around it was captured for."""

    __module__ = "rewrite.runtime"

    def __init__(self, skeleton: Any, path: str) -> None:
        self.skeleton, self.path = skeleton, path
        self.__name__ = self.__qualname__ = "expect"

    def __call__(self, result: Any, sizes: list[tuple[Any, ...] | None]) -> Any:
        parts = calls.split(result, opened=False)
        shapes = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in parts.leaves]
        expected = [None if size is None else tuple(size) for size in sizes]
        if not same_form(parts.skeleton, self.skeleton) or shapes != expected:
            raise RewriteError(
                f"module {self.path!r}",
                f"it returned tensors of shapes {shapes}, where the graph around it was captured for {expected}",
                "its result depends on data: name the paths of the modules around it in `opaque=[...]`",
            )
        return result


def same_form(one: Any, other: Any) -> bool:
    """Whether two skeletons are equal, of tensors the dtype and the number of dimensions alone."""
    if isinstance(one, tuple) and isinstance(other, tuple) and one[:1] == other[:1] == ("tensor",):
        return bool(one[1] == other[1] and one[3] == other[3])  # the dtype, the number of dimensions
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(same_form(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


Function = Callable[..., Any]
