"""The short way through fake tensors: an operator met again gives again what it gave.

A training step runs the same operators on the same kinds of operands, block after block. FakeTensorMode remembers
results too, but spends most of a step on the keys it finds them by and on the checks in the constructor of
`FakeTensor`, and forgets that a kernel padded a storage. Private torch names: `cache_enabled` of the mode,
`_DisableTorchDispatch`, `_dispatch_keys`, `_make_subclass`, `_set_throw_on_mutable_data_ptr`, and what a `FakeTensor`
keeps among its attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_CPU = torch.device("cpu")


class Made(NamedTuple):
    """A new tensor, with a storage of its own or with that of an argument."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    viewed: int | None = None
    """Position of the argument whose storage it has."""
    storage_bytes: int | None = None
    """Size of a storage of its own that is larger than the tensor."""


class Written(NamedTuple):
    """The argument at this position, written in place."""

    position: int


class QuickFakes:
    """Runs operators on the fakes of one mode, which must be active; results are those the mode gives."""

    def __init__(self, mode: FakeTensorMode) -> None:
        mode.cache_enabled = False
        with mode:
            plain = torch.empty(0)
        self._mode = mode
        self._attributes = dict(vars(plain))
        self._plain_keys = _dispatch_keys(plain)
        self._known: dict[Hashable, Any] = {}
        """What each kind of call gave: a result, several, or `_UNIQUE` for what cannot be made again."""
        self._steady: dict[Any, bool] = {}

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `func` gives; raises whatever it raises."""
        key = self._key(func, args, kwargs)
        known: Any = _UNIQUE if key is None else self._known.get(key)
        if known is None:
            out = func(*args, **kwargs)
            self._known[key] = self._described(out, args, kwargs)
            return out
        if known is _UNIQUE:
            return func(*args, **kwargs)
        if type(known) in _SEQUENCES:
            return type(known)([self._again(result, args) for result in known])
        return self._again(known, args)

    def tensor(
        self,
        shape: torch.Size,
        stride: tuple[int, ...],
        dtype: torch.dtype,
        storage: torch.UntypedStorage | None = None,
        offset: int = 0,
    ) -> FakeTensor:
        """A dense fake CPU tensor, `offset` elements into `storage` (of the meta device; by default one as large)."""
        with torch._C._DisableTorchDispatch():
            meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if storage is not None:
                meta.set_(storage, offset, shape, stride)
            fake = FakeTensor._make_subclass(
                FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=_CPU
            )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self._attributes)
        return fake

    def _again(self, result: Made | Written | None, args: tuple[Any, ...]) -> Any:
        if result is None:
            return None
        if isinstance(result, Written):
            return args[result.position]
        shape, stride, offset, dtype, viewed, storage_bytes = result
        storage = None
        if viewed is not None:
            storage = args[viewed].untyped_storage()
        elif storage_bytes is not None:
            storage = meta_storage(storage_bytes)
        return self.tensor(shape, stride, dtype, storage, offset)

    # What a call is told by.

    def _key(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Equal for calls that give the same; None for a call of which that cannot be said."""
        steady = self._steady.get(func)
        if steady is None:
            steady = self._steady[func] = _is_steady(func)
        parts: list[Hashable] = [func, torch.get_default_dtype(), *kwargs]
        if not steady or not self._tell(args, parts) or not self._tell(kwargs.values(), parts):
            return None
        return tuple(parts)

    def _tell(self, values: Iterable[Any], parts: list[Hashable]) -> bool:
        """Add to `parts` everything about `values` that a result can depend on; False when that is not known."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if not self._is_plain(value):
                    return False
                parts += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad)
            elif kind in _NUMBERS:
                parts.append((kind, value))
            elif kind in _SEQUENCES:
                parts.append((kind, len(value)))
                if not self._tell(value, parts):
                    return False
            elif kind in _NAMES:
                parts.append(value)
            else:
                return False
        return True

    def _is_plain(self, fake: FakeTensor) -> bool:
        """Whether it is dense, on the CPU, of our mode, of no known value, and neither conjugated nor negated."""
        return fake.constant is None and fake.fake_mode is self._mode and _dispatch_keys(fake) == self._plain_keys

    # What a result is told by.

    def _described(self, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))]
        if type(out) not in (tuple, list):
            return _UNIQUE if out is None else self._result(out, args, given)
        results = [None if each is None else self._result(each, args, given) for each in out]
        new = [storage for tensor in _tensors(out) if (storage := tensor.untyped_storage()._cdata) not in given]
        return _UNIQUE if _UNIQUE in results or len(set(new)) < len(new) else type(out)(results)

    def _result(self, out: Any, args: tuple[Any, ...], given: list[int]) -> Any:
        """`given`: the storages of all tensors among the arguments, one each."""
        for position, value in enumerate(args):
            if out is value:
                return Written(position)
        if type(out) is not FakeTensor or not self._is_plain(out) or out.requires_grad:
            return _UNIQUE
        made = Made(out.shape, out.stride(), int(out.storage_offset()), out.dtype)
        storage = out.untyped_storage()
        if storage._cdata not in given:
            size = storage.nbytes()
            return made if size == _dense_bytes(out) and not made.offset else made._replace(storage_bytes=size)
        places = [
            place
            for place, value in enumerate(args)
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata == storage._cdata
        ]
        return made._replace(viewed=places[0]) if len(places) == given.count(storage._cdata) == 1 else _UNIQUE


_UNIQUE = object()
_NUMBERS = frozenset({int, float, bool})
"""Told with their types: 1, 1.0 and True are equal, and give results of other types."""
_SEQUENCES = frozenset({tuple, list, torch.Size})
_NAMES = frozenset({type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format})
_UNSTEADY = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


def meta_storage(size: int) -> torch.UntypedStorage:
    """A storage of `size` bytes with no memory behind it."""
    return torch.UntypedStorage(size, device="meta")


def _is_steady(func: Callable[..., Any]) -> bool:
    """Whether an operator gives the same for operands of the same kind, and leaves them their shapes."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    return not any(tag in func.tags for tag in _UNSTEADY) and not any(each.is_out for each in func._schema.arguments)


def _dispatch_keys(tensor: torch.Tensor) -> int:
    """What selects the kernels for a tensor: device, layout, conjugation, negation, inference mode."""
    return int(torch._C._dispatch_keys(tensor).raw_repr())


def _dense_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * step for size, step in steps) + 1) * tensor.itemsize


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
