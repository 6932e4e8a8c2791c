"""A tensor whose content is computed when somebody reads it, and not before.

To autograd it is the result of an ordinary operator: it has a `grad_fn`, and a gradient that reaches it flows on to
what it is computed from. Its shape, dtype and device are known; any operator that reads it computes the content, once.
Nothing is ever computed from other numbers than there were: when a tensor it depends on has been changed or released
in between, reading raises.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rewrite.errors import DeferredError

aten = torch.ops.aten
STILL_DEFERRED = frozenset({aten.clone.default, aten._to_copy.default})
"""Operators that leave a content to be computed later where they find one; wrappers of models call them on outputs."""
SAME_CONTENT = frozenset({aten.detach.default, aten.alias.default})


def defer(
    function: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor | None],
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    name: str,
) -> torch.Tensor:
    """`function(*tensors)`, of the given shape and dtype, computed when it is read.

    `function` draws no random numbers and changes nothing; `name` says in errors what is read.
    """
    result: torch.Tensor = _Deferring.apply(function, tuple(shape), dtype, name, *tensors)  # type: ignore[no-untyped-call]
    return result


def dropped(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, name: str, next_step: str) -> Deferred:
    """A tensor that holds nothing: reading it raises DeferredError."""

    def raises() -> torch.Tensor:
        raise DeferredError(name, "it was dropped, as asked for, and cannot be read", next_step)

    made = Deferred(tuple(shape), dtype, device, _Content(raises))
    made.is_dropped = True
    return made


class _Content:
    """What deferred tensors share that show the same values."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self.compute: Callable[[], torch.Tensor] | None = compute
        self.value: torch.Tensor | None = None
        self.copies: list[weakref.ref[_Content]] = []
        """Contents that are computed from this one, and must be before it is written."""

    def get(self) -> torch.Tensor:
        if self.value is None:
            assert self.compute is not None
            self.value = self.compute()
            self.compute = None
        return self.value

    def before_write(self) -> None:
        for copy in self.copies:
            content = copy()
            if content is not None:
                content.get()


class Deferred(torch.Tensor):
    """See `defer`."""

    content: _Content
    is_dropped: bool = False

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, content: _Content) -> Deferred:
        made: Deferred = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, storage_size=0)
        made.content = content
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Deferred) and first.content.value is None:
            if func in SAME_CONTENT:
                return first.again(first.content, first.dtype, first.device)
            if func in STILL_DEFERRED:
                return first.later(func, args[1:], kwargs)
        writes = func._schema.is_mutable
        if writes:
            for argument in pytree.tree_leaves((args, kwargs)):
                if isinstance(argument, Deferred):
                    argument.content.before_write()
        read_args, read_kwargs = pytree.tree_map(_read, (args, kwargs))
        out = func(*read_args, **read_kwargs)
        return first if writes and isinstance(first, Deferred) and out is first.content.value else out

    def again(self, content: _Content, dtype: torch.dtype, device: torch.device) -> Deferred:
        """Another tensor of this shape."""
        made = Deferred(tuple(self.shape), dtype, device, content)
        made.is_dropped = self.is_dropped
        return made

    def later(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Deferred:
        """`func` of this content, when it is read."""
        source = self.content
        made = _Content(lambda: func(source.get(), *args, **kwargs))
        source.copies = [copy for copy in source.copies if copy() is not None]
        source.copies.append(weakref.ref(made))
        device = torch.device(kwargs.get("device") or self.device)
        return self.again(made, kwargs.get("dtype") or self.dtype, device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Of the content, without computing it."""
        if self.content.value is not None:
            return repr(self.content.value)
        return f"deferred(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    # What torch refuses for subclasses, since it reads below the dispatcher.

    def numpy(self, *, force: bool = False) -> Any:
        """As of an ordinary tensor."""
        return self._plain().numpy(force=force)

    def tolist(self) -> Any:
        """As of an ordinary tensor."""
        return self._plain().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        return self._plain().__array__(dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        made = self._plain().__deepcopy__(memo)
        memo[id(self)] = made
        return made

    def data_ptr(self) -> int:
        """As of an ordinary tensor."""
        return self.content.get().data_ptr()

    def _plain(self) -> torch.Tensor:
        """An ordinary tensor of the same content and the same history."""
        return self.view_as(self)


def _read(value: Any) -> Any:
    return value.content.get() if isinstance(value, Deferred) else value


class _Deferring(torch.autograd.Function):
    """Autograd's view of `function(*tensors)`: nothing in the forward, all of it in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        name: str,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.function = function
        ctx.around = autocast_now(tensors)
        ctx.save_for_backward(*tensors)
        device = next(tensor.device for tensor in tensors if tensor is not None)
        return Deferred(shape, dtype, device, _Content(_Reading(function, tensors, ctx.around, name)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[4:]
        given = [_leaf(tensor, need) for tensor, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad(), ctx.around():
            out = ctx.function(*given)
        wanted = [tensor for tensor, need in zip(given, needed, strict=True) if tensor is not None and need]
        found = iter(torch.autograd.grad(out, wanted, _read(grad), allow_unused=True))
        return (None, None, None, None, *[next(found) if need else None for need in needed])


def _leaf(tensor: torch.Tensor | None, need: bool) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().requires_grad_(need)


class _Reading:
    """Computes a content from tensors that must be as they were."""

    def __init__(
        self,
        function: Callable[..., torch.Tensor],
        tensors: Sequence[torch.Tensor | None],
        around: Callable[[], contextlib.AbstractContextManager[Any]],
        name: str,
    ) -> None:
        self.function, self.around, self.name = function, around, name
        self.tensors = [None if tensor is None else tensor.detach() for tensor in tensors]
        self.sizes = [_bytes(tensor) for tensor in self.tensors]
        self.versions = [_version(tensor) for tensor in tensors]

    def __call__(self) -> torch.Tensor:
        for tensor, size, version in zip(self.tensors, self.sizes, self.versions, strict=True):
            if _version(tensor) != version:
                raise self._late("what they are computed from, such as a weight, has been changed in place since")
            if _bytes(tensor) != size:
                raise self._late("a weight they are computed from has been released since (it is sharded)")
        with torch.no_grad(), self.around():
            return self.function(*self.tensors)

    def _late(self, cause: str) -> DeferredError:
        return DeferredError(
            f"reading {self.name}",
            f"they are computed when they are read, and {cause}",
            "read them before the backward and the optimizer's step, or have them kept with logits=keep",
        )


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.layout != torch.strided else tensor.untyped_storage().nbytes()


def autocast_now(tensors: Sequence[torch.Tensor | None]) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A context that has autocast as it is now, for the device of `tensors`, without its cache of casts.

    Without: a cast that is made below an autograd Function has no history, and must not serve outside it.
    """
    device = next((tensor.device.type for tensor in tensors if tensor is not None), "cpu")
    if device == "meta" or not torch.amp.is_autocast_available(device):
        return contextlib.nullcontext
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype, enabled, cache_enabled=False)
