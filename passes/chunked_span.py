"""A position-wise span of a graph, cut into rows, each cut computed again by itself in the backward.

The forward writes each cut's result in its place and holds the span's entry alone. The backward computes the inside of
one cut at a time; what the last product gives is never computed again, and gradients of weights are added up in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from passes.chunked_loss import chunk_sizes
from passes.pieces import Piece
from rewrite import autocast_now


class ChunkedSpan:
    """What a graph calls in place of a span: `linear(piece(entry), weight, bias)`."""

    __module__ = "passes.chunked_span"

    def __init__(self, chunks: int, piece: Piece, transposed: bool) -> None:
        """`transposed`: the last weight is [in, out] rather than [out, in]."""
        self.chunks, self.piece, self.transposed = chunks, piece, transposed
        self.__name__ = self.__qualname__ = "chunk_ffn"

    def __repr__(self) -> str:
        return f"{self.__name__}{{chunks={self.chunks}}}"

    def __call__(
        self,
        entry: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        modules: Sequence[nn.Module],
        tensors: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """`entry`: [..., width]; `weight`: [out, in]; returns [..., out]. `modules` and `tensors` are the piece's.

        Without a weight the piece is the whole span.
        """
        result: torch.Tensor = _Chunked.apply(  # type: ignore[no-untyped-call]
            self, modules, entry, weight, bias, *tensors
        )
        return result

    def cuts(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Rows of a tensor in turn, as views where the tensor lies row by row."""
        rows = tensor.reshape(-1, tensor.shape[-1])
        parts: Sequence[torch.Tensor] = rows.split(chunk_sizes(rows.shape[0], self.chunks))
        return parts


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        span: ChunkedSpan,
        modules: Sequence[nn.Module],
        entry: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.span, ctx.modules, ctx.around = span, modules, autocast_now([entry])
        ctx.save_for_backward(entry, weight, bias, *tensors)
        matrix = None if weight is None else _matrix(span, weight)
        out: Any = None
        start = 0
        with ctx.around():
            for part in span.cuts(entry):
                made = span.piece(part, modules, tensors, functional.linear)
                if matrix is not None:
                    made = functional.linear(made, matrix, bias)
                if out is None:
                    out = made.new_empty((entry.shape[:-1].numel(), made.shape[-1]))
                out[start : start + part.shape[0]] = made
                start += part.shape[0]
                del made
        return out.view(*entry.shape[:-1], out.shape[-1])  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        span = ctx.span
        entry, weight, bias, *tensors = ctx.saved_tensors
        needs_entry, needs_weight, needs_bias, *needed = ctx.needs_input_grad[2:]
        leaves = [each.detach().requires_grad_(need) for each, need in zip(tensors, needed, strict=True)]
        sums, last = Sums(leaves, needed), Sums([weight, bias], [needs_weight, needs_bias])
        matrix = None if weight is None else _matrix(span, weight)
        of_entry = torch.empty_like(entry, memory_format=torch.contiguous_format) if needs_entry else None
        places = span.cuts(entry if of_entry is None else of_entry)
        trained = [each for each in leaves if each.requires_grad]
        with ctx.around():
            for part, flowing, place in zip(span.cuts(entry), span.cuts(grad), places, strict=True):
                leaf = part.detach().requires_grad_(needs_entry)
                with torch.enable_grad():
                    inside = span.piece(leaf, ctx.modules, leaves, sums.product)
                back = flowing
                if matrix is not None:
                    back = last.through(flowing, inside.detach(), matrix, span.transposed)
                if not inside.requires_grad:
                    continue
                wanted = [leaf, *trained] if needs_entry else trained
                found = torch.autograd.grad(inside, wanted, back, allow_unused=True)
                del inside, back
                if of_entry is not None:
                    place.copy_(found[0])
                    found = found[1:]
                sums.add_all(found)
        return (None, None, of_entry, *last.ready(), *sums.ready())


def _matrix(span: ChunkedSpan, weight: torch.Tensor) -> torch.Tensor:
    """The last weight as [out, in], without history: autocast keeps no cast of it."""
    return (weight.t() if span.transposed else weight).detach()


class Sums:
    """Gradients of tensors, added up in place over chunks.

    Of a weight in half precision the sum is kept in single: adding up in half would lose what each chunk adds.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None], needed: Sequence[bool]) -> None:
        self.tensors = tensors
        self.needed = needed
        self.totals: list[torch.Tensor | None] = [None for _ in tensors]
        self.wide = [None if each is None else torch.promote_types(each.dtype, torch.float32) for each in tensors]
        self.trained = [index for index, each in enumerate(tensors) if each is not None and each.requires_grad]

    def product(self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """As `linear`; in its backward the gradient of a weight among the tensors is added here."""
        result: torch.Tensor = _Into.apply(self, rows, weight, bias)  # type: ignore[no-untyped-call]
        return result

    def find(self, weight: torch.Tensor) -> tuple[int, bool] | None:
        """Which of the tensors a weight is, and whether it is that one transposed."""
        for index, tensor in enumerate(self.tensors):
            if weight is tensor:
                return index, False
            if tensor is not None and weight._base is tensor and weight.shape == tensor.shape[::-1]:
                return index, True
        return None

    def add_product(self, index: int, flowing: torch.Tensor, rows: torch.Tensor, transposed: bool) -> None:
        """Add the gradient of a weight: of what came out, times what went in, both [rows, features]."""
        left, right = (rows, flowing) if transposed else (flowing, rows)
        total = self.totals[index]
        wide = self.wide[index]
        if total is None:
            self.totals[index] = (left.t() @ right).to(wide)
        elif left.dtype == wide:
            total.addmm_(left.t(), right)
        else:
            total.add_(left.t() @ right)

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient that was computed as a whole."""
        total = self.totals[index]
        self.totals[index] = gradient.to(self.wide[index]) if total is None else total.add_(gradient)

    def add_all(self, found: Sequence[torch.Tensor | None]) -> None:
        """Add gradients of those tensors that require one, in order."""
        for index, gradient in zip(self.trained, found, strict=True):
            if gradient is not None:
                self.add(index, gradient)

    def through(
        self, flowing: torch.Tensor, inside: torch.Tensor, matrix: torch.Tensor, transposed: bool
    ) -> torch.Tensor:
        """Back through the last product: adds to its weight, 0, and its bias, 1; returns the gradient of `inside`."""
        if self.needed[0]:
            self.add_product(0, flowing, inside.to(flowing.dtype), transposed)
        if self.needed[1]:
            self.add(1, flowing.sum(0))
        return (flowing @ matrix.to(flowing.dtype)).to(inside.dtype)

    def ready(self) -> list[torch.Tensor | None]:
        """The sums, in the dtype of their tensors."""
        return [
            total.to(tensor.dtype) if need and total is not None and tensor is not None else None
            for total, tensor, need in zip(self.totals, self.tensors, self.needed, strict=True)
        ]


class _Into(torch.autograd.Function):
    """`linear` whose weight gradient goes straight into a sum."""

    @staticmethod
    def forward(
        ctx: Any, sums: Sums, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        device = rows.device.type
        ctx.sums, ctx.found, ctx.dtypes = sums, sums.find(weight), (rows.dtype, weight.dtype)
        weight, bias = weight.detach(), None if bias is None else bias.detach()
        if torch.is_autocast_enabled(device):
            low = torch.get_autocast_dtype(device)
            rows, weight, bias = rows.to(low), weight.to(low), None if bias is None else bias.to(low)
        ctx.save_for_backward(rows, weight)
        return functional.linear(rows, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        rows, matrix = ctx.saved_tensors
        of_rows = (grad @ matrix).to(ctx.dtypes[0]) if ctx.needs_input_grad[1] else None
        of_weight = None
        if ctx.needs_input_grad[2] and ctx.found is None:
            of_weight = (grad.t() @ rows).to(ctx.dtypes[1])
        elif ctx.needs_input_grad[2]:
            index, transposed = ctx.found
            ctx.sums.add_product(index, grad, rows, transposed)
        of_bias = grad.sum(0) if ctx.needs_input_grad[3] else None
        return None, of_rows, of_weight, of_bias
