"""Work of a run: floating point operations and bytes moved, operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from rewrite.memory.timeline import Work

aten = torch.ops.aten


class Tally:
    """Adds up what operators cost. Views and allocations cost nothing; a written tensor counts as read too."""

    def __init__(self) -> None:
        self.flops = {"forward": 0, "backward": 0, "optimizer": 0}
        self._calls: dict[tuple[int, int, bool, bool], int] = {}
        self._free: dict[Any, bool] = {}

    def restart(self) -> None:
        """Forget everything counted so far."""
        self.flops = dict.fromkeys(self.flops, 0)
        self._calls.clear()

    def count(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, phase: str
    ) -> None:
        free = self._free.get(func)
        if free is None:
            free = self._free[func] = _costs_nothing(func)
        if free:
            return
        flops = operator_flops(func, args, kwargs, out)
        self.flops[phase] += flops
        moved = half = 0
        for tensor in _tensors((args, kwargs.values(), out)):
            moved += tensor.numel() * tensor.itemsize
        for tensor in _tensors((out,)):
            half = tensor.itemsize == 2
            break
        key = (flops, moved, bool(half), _is_fused_attention(func))
        self._calls[key] = self._calls.get(key, 0) + 1

    def work(self) -> tuple[Work, ...]:
        return tuple(Work(*key, calls) for key, calls in self._calls.items())

    def moved_bytes(self) -> int:
        return sum(moved * calls for (_, moved, *_), calls in self._calls.items())


def operator_flops(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Multiplications and additions of one operator, two for a multiply-add; 0 for what is not matrix work."""
    if not isinstance(func, torch._ops.OpOverload):
        return 0
    packet = func.overloadpacket
    own = _OWN_FORMULAS.get(packet)
    if own is not None:
        return own(*args)
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward_flops(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _grouped_flops(left: torch.Tensor, right: torch.Tensor, *_: Any) -> int:
    """Every row of `left` (or every shared column, for two 2-D operands) meets one group of `right`."""
    rows, shared = left.shape[-2], left.shape[-1]
    return 2 * rows * shared * right.shape[-1] * (left.shape[0] if left.dim() == 3 and right.dim() == 3 else 1)


def _product_flops(left: torch.Tensor, right: torch.Tensor, *_: Any) -> int:
    """As the registry counts, without its search for tensors in the arguments."""
    return 2 * left.numel() * right.shape[-1]


def _added_product_flops(_: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> int:
    return _product_flops(left, right)


_OWN_FORMULAS: dict[Any, Callable[..., int]] = {
    aten.mm: _product_flops,
    aten.bmm: _product_flops,
    aten.addmm: _added_product_flops,
    aten.addmm_: _added_product_flops,
    aten.baddbmm_: _added_product_flops,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    aten._grouped_mm: _grouped_flops,
}

_ALLOCATIONS = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "lift_fresh"})


def _is_fused_attention(func: Callable[..., Any]) -> bool:
    return isinstance(func, torch._ops.OpOverload) and func.overloadpacket.__name__.startswith(_FUSED_ATTENTION)


_FUSED_ATTENTION = ("_scaled_dot_product_", "_flash_attention", "_efficient_attention", "_cudnn_attention")


def _costs_nothing(func: Callable[..., Any]) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return True
    return func.is_view or func.overloadpacket.__name__ in _ALLOCATIONS or func is aten.detach.default


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
