"""Every storage of a run, from birth to death."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rewrite.capture.answers import operator_name
from rewrite.memory.autograd import (
    holders,
    lone_holders,
    newest_sequence_number,
    routes_twice,
    running_sequence_number,
)
from rewrite.memory.devices import cuda_scratch_bytes
from rewrite.memory.lstm_scratch import with_workspace
from rewrite.memory.place import Place, Places
from rewrite.memory.questions import Questions
from rewrite.memory.scratch import scratch_bytes
from rewrite.memory.work import Tally

aten = torch.ops.aten

OUTSIDE = Place("", "", "")


class Storage:
    """One allocation. `category` is set when what it is for becomes known."""

    __slots__ = ("alive", "bytes", "category", "dtype", "made_by", "phase", "place", "shape")

    def __init__(self, size: int, shape: tuple[int, ...], dtype: str, category: str, phase: str, place: Place) -> None:
        self.bytes = size
        self.shape = shape
        self.dtype = dtype
        self.category = category
        self.phase = phase
        self.place = place
        self.alive = True
        self.made_by = running_sequence_number()
        """Number of the autograd node whose backward made it; None for what the forward made."""


Event = tuple[Storage, int, str]
"""(storage, change in bytes, phase)."""


class Tracker(TorchDispatchMode):
    """Records births, deaths and changes of size of the storages that operators make, in order.

    The same for real and for fake tensors. What is alive before the mode is entered is told with `hold`.
    """

    def __init__(self, places: Places, questions: Questions, tally: Tally, *, cpu_kernels: bool = True) -> None:
        """`cpu_kernels`: count what CPU kernels take below the dispatcher."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._cpu_kernels = cpu_kernels
        self.phase = "forward"
        self.events: list[Event] = []
        self._places = places
        self._questions = questions
        self._tally = tally
        self._known: dict[int, tuple[weakref.ref[Any], Storage]] = {}
        self._last_number = -1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would wrap each call below to hide it from its compiler, which is not at work here."""
        return False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # torch asks this of fakes more often than everything else together
        kwargs = kwargs or {}
        number = newest_sequence_number()
        if number != self._last_number:
            self._last_number = number
            self._places.remember(number, self._places.now(operator_name(func)))
        if func is aten.add.Tensor and self._engine_adds(args, kwargs):
            func = aten.add_.Tensor
        out = with_workspace(func, args, self._questions.run(func, args, kwargs))
        self._tally.count(func, args, kwargs, out, self.phase)
        self._scratch(func, args, out)
        self._see(func, out)
        return out

    def hold(self, tensor: torch.Tensor, category: str, place: Place = OUTSIDE) -> None:
        """Count a storage that is there already; twice is once."""
        storage = tensor.untyped_storage()
        if self._find(storage) is None:
            self._add(storage, tensor, category, place)

    def restart(self) -> None:
        """Forget everything seen so far."""
        self._known.clear()
        self.events.clear()

    def set_category(self, tensor: torch.Tensor, category: str, module_path: str = "") -> None:
        """Say what the storage under `tensor` is for."""
        found = self._find(tensor.untyped_storage())
        if found is None:
            return
        found.category = category
        if module_path:
            found.place = found.place._replace(module_path=module_path)

    def alive(self) -> list[Storage]:
        return [storage for _, storage in self._known.values()]

    def owner(self, tensor: torch.Tensor) -> Storage | None:
        """The storage under `tensor`, when it is known."""
        return self._find(tensor.untyped_storage())

    def _engine_adds(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the autograd engine is adding up two gradients for one place, the first held by nobody else.

        It does so in place, except below a dispatch mode or on fakes (`can_accumulate_inplace` in
        torch/csrc/autograd/input_buffer.cpp): there a gradient more would be alive than in a step without us.
        """
        number = running_sequence_number()
        if number is None or kwargs or torch.is_grad_enabled() or holders(args[0]) != lone_holders():
            return False
        first = self.owner(args[0])
        return first is not None and (first.made_by != number or routes_twice())

    def _scratch(self, func: Callable[..., Any], args: tuple[Any, ...], out: Any) -> None:
        """Count what the kernel held while it ran, beside the results that are seen next."""
        size = scratch_bytes(func, args, out) if self._cpu_kernels else cuda_scratch_bytes(func, args)
        if not size:
            return
        results = [tensor for tensor in (out if isinstance(out, (tuple, list)) else [out]) if tensor is not None]
        size += sum(tensor.untyped_storage().nbytes() for tensor in results)
        held = Storage(size, (size,), "uint8", "temporary", self.phase, self._places.now(operator_name(func)))
        self.events.append((held, size, self.phase))
        self.events.append((held, -size, self.phase))

    def _see(self, func: Callable[..., Any], out: Any) -> None:
        if isinstance(out, torch.Tensor):
            self._see_tensor(func, out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self._see_tensor(func, item)
                elif isinstance(item, (tuple, list)):
                    self._see(func, item)

    def _see_tensor(self, func: Callable[..., Any], tensor: torch.Tensor) -> None:
        if tensor.layout != torch.strided:
            for part in strided_parts(tensor):
                self._see_tensor(func, part)
            return
        storage = tensor.untyped_storage()
        found = self._find(storage)
        if found is None:
            self._add(storage, tensor, "temporary", self._places.now(operator_name(func)))
            return
        size = storage.nbytes()
        if size != found.bytes:
            self.events.append((found, size - found.bytes, self.phase))
            found.bytes = size

    def _find(self, storage: torch.UntypedStorage) -> Storage | None:
        entry = self._known.get(storage._cdata)
        if entry is None or entry[0]() is not storage:
            return None
        return entry[1]

    def _add(self, storage: torch.UntypedStorage, tensor: torch.Tensor, category: str, place: Place) -> None:
        key = storage._cdata
        size = storage.nbytes()
        dtype = str(tensor.dtype).removeprefix("torch.")
        born = Storage(size, tuple(tensor.shape), dtype, category, self.phase, place)

        def die(_: Any) -> None:
            self.events.append((born, -born.bytes, self.phase))
            born.alive = False
            entry = self._known.get(key)
            if entry is not None and entry[1] is born:
                del self._known[key]

        self._known[key] = (weakref.ref(storage, die), born)
        self.events.append((born, size, self.phase))


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The dense tensors a sparse one is made of; none for a layout that has none."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    return ()
