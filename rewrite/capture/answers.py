"""Answers to questions about data (`item`, `bool`, `nonzero`) while a model runs on fake tensors.

Beside the fake of a small tensor stands its *shadow*: the real value, derived from the example inputs and from
factory functions alone, by running the same operator on the shadows. A value that depends on a parameter, or on
random numbers, has no shadow. Works on torch functions and on aten operators alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from rewrite.capture.outside import outside_modes, size_hint

SHADOW_ELEMENTS = 2**20
"""Tensors with more elements have no shadow."""

SCALAR_QUESTIONS = frozenset(
    {
        "__bool__",
        "__int__",
        "__float__",
        "__complex__",
        "__index__",
        "__contains__",
        "item",
        "tolist",
        "numpy",
        "__array__",
        "equal",
        "allclose",
        "is_nonzero",
        "_local_scalar_dense",
    }
)
"""Names of functions that turn the data of a tensor into something that is not a tensor."""

SIZE_QUESTIONS = frozenset(
    {
        "nonzero",
        "nonzero_static",
        "argwhere",
        "masked_select",
        "unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
        "repeat_interleave",
    }
)
"""Names of functions whose result has a size that depends on data."""

VALUE_FREE = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})
"""Names of functions that take a tensor for its shape and type alone."""

_READS_NO_DATA = frozenset({"size", "dim", "numel", "stride", "is_contiguous", "__get__", "__len__", "data_ptr"})


class Answers:
    """Shadows of one run.

    `inputs` maps `id(fake)` to the real tensor the fake stands for; the caller keeps those fakes alive. Shadows
    are copies: the real tensors are never written. Nothing here touches the random number generator's state.
    """

    def __init__(self, inputs: Mapping[int, torch.Tensor]) -> None:
        self._inputs: dict[int, torch.Tensor] = {}
        self._shadows: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        with outside_modes():
            for key, real in inputs.items():
                if _has_data(real) and real.numel() <= SHADOW_ELEMENTS:
                    self._inputs[key] = real.detach().cpu().clone()

    def shadow(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The real value of a fake, or None. A real tensor is its own shadow."""
        found = self._shadows.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        given = self._inputs.get(id(tensor))
        if given is not None:
            return given
        if isinstance(tensor, FakeTensor):
            return tensor.constant
        return tensor if _has_data(tensor) and tensor.numel() <= SHADOW_ELEMENTS else None

    def set_shadow(self, tensor: torch.Tensor, real: torch.Tensor) -> None:
        """Say that the fake `tensor` has the value `real`."""
        key = id(tensor)
        self._inputs.pop(key, None)
        shadows = self._shadows

        def forget(_: object) -> None:
            shadows.pop(key, None)

        shadows[key] = (weakref.ref(tensor, forget), real)

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """Run `func` on the shadows too, after it gave `out` on the fakes."""
        name = operator_name(func)
        if name in _READS_NO_DATA:
            return
        writes = _writes(func, name, kwargs)
        outputs = list(tensors_in(out))
        if not outputs and not writes:
            return
        real = self._on_shadows(func, name, args, kwargs, outputs)
        if real is None:
            if writes:
                self._forget_written(args, kwargs)
            return
        for fake, value in zip(outputs, tensors_in(real), strict=False):
            if _same_kind(fake, value):
                self.set_shadow(fake, value)
            else:
                self._drop(fake)

    def answer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The real result of a question, or NotImplemented when `func` asks nothing or a shadow is missing.

        For a function of `SIZE_QUESTIONS` the result is a real tensor, or a tuple of them: the caller makes the
        fakes and gives them their shadows with `set_shadow`.
        """
        name = operator_name(func)
        if name not in SCALAR_QUESTIONS and name not in SIZE_QUESTIONS:
            return NotImplemented
        real = self._real_arguments(args, kwargs, value_free=False)
        if real is None:
            return NotImplemented
        with outside_modes():
            return func(*real[0], **real[1])

    def as_fakes(self, known: Any) -> Any:
        """Fakes, with their values beside them, of an answer: of tensors whose size depends on known data.

        To be called under the fake mode.
        """
        if isinstance(known, (tuple, list)):
            return type(known)(self.as_fakes(item) for item in known)
        if not isinstance(known, torch.Tensor):
            return known
        fake = torch.empty_strided(known.shape, known.stride(), dtype=known.dtype)
        self.set_shadow(fake, known)
        return fake

    def _on_shadows(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        outputs: list[torch.Tensor],
    ) -> Any:
        """What `func` gives on the shadows; None when a shadow is missing or the result must not be trusted."""
        if "empty" in name or any(_elements(fake) > SHADOW_ELEMENTS for fake in outputs):
            return None
        real = self._real_arguments(args, kwargs, value_free=name in VALUE_FREE)
        if real is None:
            return None
        with outside_modes():
            before, failed = torch.get_rng_state(), False
            try:
                result = func(*real[0], **real[1])
            except Exception:  # noqa: BLE001 - the fake run has succeeded; whatever fails here only means that no value is known
                failed, result = True, None
            if not torch.equal(before, torch.get_rng_state()):
                torch.set_rng_state(before)
                return None
        if failed:
            return None
        return () if result is None and not outputs else result

    def _real_arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, value_free: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        try:
            positional = tuple(self._real(value, value_free) for value in args)
            return positional, {key: self._real(value, value_free) for key, value in kwargs.items()}
        except _NoShadowError:
            return None

    def _real(self, value: Any, value_free: bool) -> Any:
        if isinstance(value, torch.Tensor):
            shadow = self.shadow(value)
            if shadow is not None:
                return shadow
            if value_free and _elements(value) <= SHADOW_ELEMENTS:
                return torch.empty(_sizes(value), dtype=value.dtype)
            raise _NoShadowError
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            hint = size_hint(value)
            if hint is None:
                raise _NoShadowError
            return hint
        if isinstance(value, torch.Size):
            return torch.Size([self._real(item, value_free) for item in value])
        if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            return type(value)(self._real(item, value_free) for item in value)
        if isinstance(value, dict):
            return {key: self._real(item, value_free) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._real(item, value_free) for item in (value.start, value.stop, value.step)))
        return value

    def _forget_written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Drop the shadows of what an operator wrote without our knowing the value, and of all their views."""
        written = kwargs.get("out", args[0] if args else None)
        for tensor in tensors_in(written):
            self._drop(tensor)

    def _drop(self, tensor: torch.Tensor) -> None:
        shadow = self.shadow(tensor)
        if shadow is None:
            return
        storage = shadow.untyped_storage()._cdata
        for key, (_, made) in list(self._shadows.items()):
            if made.untyped_storage()._cdata == storage:
                del self._shadows[key]
        for key, given in list(self._inputs.items()):
            if given.untyped_storage()._cdata == storage:
                del self._inputs[key]


class _NoShadowError(Exception):
    """An argument has no real value."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result, through tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def operator_name(func: Callable[..., Any]) -> str:
    """The bare name of a torch function or an operator, whatever its overload."""
    if isinstance(func, torch._ops.OpOverload):
        return str(func.overloadpacket.__name__)
    return str(getattr(func, "__name__", ""))


def _writes(func: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether `func` changes the data of its first argument, or of `out`."""
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.is_mutable
    if name in ("__setitem__", "__set__") or kwargs.get("out") is not None:
        return True
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__index__", "__int__", "__invert__", "__init__")
    return name.endswith("_") and not name.endswith("__")


def _has_data(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta and tensor.layout == torch.strided


def _sizes(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes as plain numbers; an unknown one counts as more than any shadow holds."""
    return tuple(_number(size) for size in tensor.shape)


def _number(size: int | torch.SymInt) -> int:
    if not isinstance(size, torch.SymInt):
        return size
    hint = size_hint(size)
    return SHADOW_ELEMENTS + 1 if hint is None else int(hint)


def _elements(tensor: torch.Tensor) -> int:
    count = 1
    for size in _sizes(tensor):
        count *= size
    return count


def _same_kind(fake: torch.Tensor, real: torch.Tensor) -> bool:
    return fake.dtype == real.dtype and _sizes(fake) == tuple(real.shape)
