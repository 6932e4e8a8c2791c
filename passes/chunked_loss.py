"""Head and cross-entropy together, rows at a time: the logits of all rows never exist at once.

Two ways. `AheadLoss` has the gradients of hidden states and weights computed in the forward, where the logits are at
hand, and scaled in the backward by the gradient that comes in: no product is computed twice. It needs a head that is
one linear map, and one number as the loss. `AgainLoss` computes each chunk again in the backward, through whatever
the head is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from passes.private import graph_is_kept
from rewrite import autocast_now

Span = Callable[..., torch.Tensor]
"""A position-wise function of rows and of further tensors (weights) that are the same for every row."""


@dataclass(frozen=True)
class CrossEntropy:
    """Options of `torch.nn.functional.cross_entropy`."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0

    def of(
        self, scores: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None, reduction: str
    ) -> torch.Tensor:
        """The loss of `scores` (rows x classes) against `labels` (rows), with another reduction, at least in single."""
        wide = torch.promote_types(scores.dtype, torch.float32)
        if weight is not None:
            weight = weight.to(wide)
        return functional.cross_entropy(
            scores.to(wide), labels, weight, None, self.ignore_index, None, reduction, self.label_smoothing
        )

    def count(self, labels: torch.Tensor, weight: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """What `mean` divides by: the number of rows that count, or their classes' weights."""
        counted = labels != self.ignore_index
        if weight is None:
            return counted.sum().to(dtype)
        return (weight[torch.where(counted, labels, 0)] * counted).sum().to(dtype)


def chunk_sizes(rows: int, chunks: int) -> list[int]:
    """At most `chunks` sizes that add up to `rows`, the last perhaps shorter; one of 0 for no rows."""
    size = max(1, math.ceil(rows / chunks))
    return [min(size, rows - start) for start in range(0, rows, size)] or [0]


class ChunkedLoss:
    """What a graph calls in place of head and cross-entropy."""

    __module__ = "passes.chunked_loss"

    def __init__(self, chunks: int, loss: CrossEntropy, dtype: torch.dtype) -> None:
        self.chunks = chunks
        self.loss = loss
        self.dtype = dtype
        """Of the loss."""
        self.__name__ = self.__qualname__ = "chunk_loss"

    def __repr__(self) -> str:
        default = CrossEntropy()
        told = {name: value for name, value in vars(self.loss).items() if value != getattr(default, name)}
        options = ", ".join(f"{name}={value!r}" for name, value in {"chunks": self.chunks, **told}.items())
        return f"{self.__name__}{{{options}}}"


class AheadLoss(ChunkedLoss):
    """`cross_entropy(tail(linear(hidden, weight, bias), *more), labels, class_weight)`, gradients in the forward."""

    def __init__(self, chunks: int, loss: CrossEntropy, tail: Span | None, dtype: torch.dtype) -> None:
        super().__init__(chunks, loss, dtype)
        self.tail = tail

    def __call__(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        class_weight: torch.Tensor | None,
        more: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """`hidden`: [..., width]; `labels`: as many whole numbers; `weight`: [classes, width]. Returns a scalar."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        result: torch.Tensor = _Ahead.apply(  # type: ignore[no-untyped-call]
            self, torch.is_grad_enabled(), rows, labels.reshape(-1), weight, bias, class_weight, *more
        )
        return result


class AgainLoss(ChunkedLoss):
    """`cross_entropy(span(hidden, *tensors), labels, class_weight)`, each chunk again in the backward."""

    def __init__(self, chunks: int, loss: CrossEntropy, span: Span, dtype: torch.dtype) -> None:
        super().__init__(chunks, loss, dtype)
        self.span = span

    def __call__(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        class_weight: torch.Tensor | None,
        modules: Sequence[torch.nn.Module],
        tensors: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """As above; `modules` are those that `span` calls, `tensors` what it reads, their weights included."""
        rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        span = self.span
        losses: torch.Tensor = _Again.apply(  # type: ignore[no-untyped-call]
            self, lambda part, *given: span(part, modules, given), rows, targets, class_weight, *tensors
        )
        if self.loss.reduction == "none":
            losses = losses.view(labels.shape)
        if self.loss.reduction == "mean":
            losses = losses / self.loss.count(targets, class_weight, losses.dtype)
        return losses.to(self.dtype)


class _Ahead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        chunked: AheadLoss,
        train: bool,
        rows: torch.Tensor,
        labels: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        class_weight: torch.Tensor | None,
        *more: torch.Tensor,
    ) -> torch.Tensor:
        needs = [train and need for need in ctx.needs_input_grad]
        gradients = _Gradients(rows, weight, bias, more, (needs[2], needs[4], needs[5], needs[7:]))
        around = autocast_now([rows])
        with around():
            low = torch.get_autocast_dtype(rows.device.type) if torch.is_autocast_enabled(rows.device.type) else None
        matrix, offset = _cast(weight, low), _cast(bias, low)
        total: Any = 0.0
        for place, part, targets in _chunks(chunked.chunks, rows, labels):
            part = _cast(part, low)
            with torch.autocast(rows.device.type, enabled=False):
                logits = functional.linear(part, matrix, offset)
            with around():
                scores, back = _through_tail(chunked.tail, logits, more, gradients.more_needed, train)
            step = _Step(chunked.loss, scores, targets, class_weight)
            del logits, scores  # of one chunk, as little as can be at once
            total = total + step.total
            if gradients.needed:
                flowing, per_row = step.gradient(separate=back is None)
                if back is not None:
                    flowing = gradients.add_more(back(flowing))
                with torch.autocast(rows.device.type, enabled=False):
                    gradients.add(place, part, matrix, flowing.to(part.dtype), per_row)
                del flowing
            del step, back
        return _finish(ctx, chunked, labels, class_weight, total, gradients)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        scale, *held = ctx.saved_tensors
        factor = scale * grad.to(scale.dtype)
        kept = graph_is_kept()
        scaled = [
            None if each is None else (each * factor if kept else each.detach().mul_(factor)).to(dtype)
            for each, dtype in zip(held, ctx.dtypes, strict=True)
        ]
        rows, weight, bias, *more = scaled
        return (None, None, rows, None, weight, bias, None, *more)


def _finish(
    ctx: Any,
    chunked: ChunkedLoss,
    labels: torch.Tensor,
    class_weight: torch.Tensor | None,
    total: torch.Tensor,
    gradients: _Gradients,
) -> torch.Tensor:
    """Save the gradients of the sum and what they are to be multiplied by; returns the loss."""
    loss = chunked.loss
    if loss.reduction == "sum":
        scale = torch.ones_like(total)
    else:
        count = loss.count(labels, class_weight, total.dtype)
        total = total / count
        scale = torch.where((labels != loss.ignore_index).any(), 1 / count, 0.0)
    held = gradients.held()
    ctx.dtypes = gradients.dtypes
    ctx.save_for_backward(scale, *held)
    return total.to(chunked.dtype)


def _chunks(
    chunks: int, rows: torch.Tensor, labels: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    start = 0
    for size in chunk_sizes(rows.shape[0], chunks):
        place = slice(start, start + size)
        yield place, rows[place].detach(), labels[place]
        start += size


def _cast(tensor: Any, dtype: torch.dtype | None) -> Any:
    """Detached, so that autocast keeps no cast of a weight that has no history."""
    return None if tensor is None else tensor.detach() if dtype is None else tensor.detach().to(dtype)


Backwards = Callable[[torch.Tensor], list[torch.Tensor]]


def _through_tail(
    tail: Span | None, logits: torch.Tensor, more: Sequence[torch.Tensor], needed: Sequence[bool], train: bool
) -> tuple[torch.Tensor, Backwards | None]:
    """The scores, and a function from their gradient to those of the logits and of `more`; None for no tail."""
    if tail is None:
        return logits, None
    with torch.set_grad_enabled(train):
        leaf = logits.requires_grad_(train)
        given = [tensor.detach().requires_grad_(need) for tensor, need in zip(more, needed, strict=True)]
        scores = tail(leaf, *given)
    wanted = [leaf, *(tensor for tensor, need in zip(given, needed, strict=True) if need)]

    def backwards(flowing: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(scores, wanted, flowing.to(scores.dtype)))

    return scores.detach(), backwards


class _Step:
    """Cross-entropy of one chunk: its sum, and the gradient of that sum, in single precision or better."""

    def __init__(
        self, loss: CrossEntropy, scores: torch.Tensor, labels: torch.Tensor, class_weight: torch.Tensor | None
    ) -> None:
        dtype = torch.float64 if scores.dtype == torch.float64 else torch.float32
        self.smoothing = loss.label_smoothing
        self.class_weight = None if class_weight is None else class_weight.detach().to(dtype)
        self.logs = torch.log_softmax(scores, 1, dtype=dtype)
        counted = labels != loss.ignore_index
        self.labels = torch.where(counted, labels, 0).unsqueeze(1)
        self.counted = counted.to(dtype)
        picked = torch.where(counted, self.logs.gather(1, self.labels).squeeze(1), 0.0)
        self.of_label = self.counted
        if self.class_weight is not None:
            self.of_label = self.class_weight[self.labels.squeeze(1)] * self.counted
        self.total = -(1 - self.smoothing) * (self.of_label * picked).sum()
        if self.smoothing:
            every = self.logs.sum(1) if self.class_weight is None else self.logs @ self.class_weight
            self.total = self.total - self.smoothing / self.logs.shape[1] * torch.where(counted, every, 0.0).sum()

    def gradient(self, *, separate: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of the scores. When `separate`, what rows are still to be multiplied by comes second, if they are.

        The rows' factors are then left to be applied where rows are narrow. Uses up the log-probabilities.
        """
        gradient = self.logs.exp_()
        if not self.smoothing:
            gradient.scatter_add_(
                1, self.labels, self.labels.new_full((), -1).to(gradient.dtype).expand_as(self.labels)
            )
            return (gradient, self.of_label) if separate else (gradient.mul_(self.of_label.unsqueeze(1)), None)
        classes = gradient.shape[1]
        shared: Any = self.smoothing / classes * (1.0 if self.class_weight is None else self.class_weight)
        in_all: Any = self.smoothing if self.class_weight is None else shared.sum()
        own = (1 - self.smoothing) * self.of_label
        gradient.mul_((own + in_all).unsqueeze(1)).sub_(shared).scatter_add_(1, self.labels, -own.unsqueeze(1))
        return (gradient, self.counted) if separate else (gradient.mul_(self.counted.unsqueeze(1)), None)


class _Gradients:
    """Sums over chunks of the gradients of the summed loss.

    Sums of a weight in half precision are kept in single: adding up in half would lose what each chunk adds.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        more: Sequence[torch.Tensor],
        needs: tuple[bool, bool, bool, Sequence[bool]],
    ) -> None:
        of_rows, self.of_weight, self.of_bias, self.more_needed = needs
        self.needed = of_rows or self.of_weight or self.of_bias or any(self.more_needed)
        self.rows = torch.empty_like(rows, memory_format=torch.contiguous_format) if of_rows else None
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.more: list[torch.Tensor | None] = [None for _ in more]
        self.dtypes = [_dtype(tensor) for tensor in (rows, weight, bias, *more)]

    def add(
        self,
        place: slice,
        part: torch.Tensor,
        matrix: torch.Tensor,
        flowing: torch.Tensor,
        per_row: torch.Tensor | None,
    ) -> None:
        """Of a chunk, whose logits have the gradient `flowing`, times `per_row` in each row."""
        factor = None if per_row is None else per_row.to(part.dtype).unsqueeze(1)
        if self.rows is not None:
            into = self.rows[place]
            torch.mm(flowing, matrix, out=into) if into.dtype == flowing.dtype else into.copy_(flowing @ matrix)
            if factor is not None:
                into.mul_(factor)
        weighted = part if factor is None else part * factor
        if self.of_weight:
            self.weight = _add_product(self.weight, flowing.t(), weighted, self.dtypes[1])
        if self.of_bias:
            ones = flowing.new_ones(flowing.shape[0], 1) if factor is None else factor
            self.bias = _add_product(self.bias, flowing.t(), ones, self.dtypes[2])

    def add_more(self, found: list[torch.Tensor]) -> torch.Tensor:
        """Add those of the tail's own tensors; returns that of the logits, which comes first."""
        flowing, *rest = found
        for place, need in enumerate(self.more_needed):
            if need:
                gained = rest.pop(0).to(torch.promote_types(self.dtypes[3 + place], torch.float32))
                before = self.more[place]
                self.more[place] = gained if before is None else before.add_(gained)
        return flowing

    def held(self) -> list[torch.Tensor | None]:
        """To be saved: in the dtype of what they are gradients of, unless that is too narrow before scaling."""
        bias = None if self.bias is None else self.bias.squeeze(1)
        found = [self.rows, self.weight, bias, *self.more]
        return [
            each.to(dtype) if each is not None and dtype is not torch.float16 else each
            for each, dtype in zip(found, self.dtypes, strict=True)
        ]


def _dtype(tensor: torch.Tensor | None) -> torch.dtype:
    return torch.float32 if tensor is None else tensor.dtype


def _add_product(
    total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    wide = torch.promote_types(dtype, torch.float32)
    if total is None:
        return (left @ right).to(wide)
    return total.addmm_(left, right) if left.dtype == wide else total.add_(left @ right)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        chunked: AgainLoss,
        span: Span,
        rows: torch.Tensor,
        labels: torch.Tensor,
        class_weight: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.chunked, ctx.span, ctx.around = chunked, span, autocast_now([rows])
        ctx.save_for_backward(rows, labels, class_weight, *tensors)
        each = chunked.loss.reduction == "none"
        found = []
        with ctx.around():
            for _, part, targets in _chunks(chunked.chunks, rows, labels):
                found.append(chunked.loss.of(span(part, *tensors), targets, class_weight, "none" if each else "sum"))
        return torch.cat(found) if each else torch.stack(found).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        rows, labels, class_weight, *tensors = ctx.saved_tensors
        needs = ctx.needs_input_grad
        loss = ctx.chunked.loss
        of_rows = torch.empty_like(rows, memory_format=torch.contiguous_format) if needs[2] else None
        given = [each.detach().requires_grad_(need) for each, need in zip(tensors, needs[5:], strict=True)]
        weights = [each for each, need in zip(given, needs[5:], strict=True) if need]
        sums: list[torch.Tensor] = []
        for place, part, targets in _chunks(ctx.chunked.chunks, rows, labels):
            part.requires_grad_(needs[2])
            with torch.enable_grad(), ctx.around():
                one = loss.of(ctx.span(part, *given), targets, class_weight, "none" if grad.dim() else "sum")
            flowing = grad[place] if grad.dim() else grad
            found = list(torch.autograd.grad(one, [*([part] if needs[2] else []), *weights], flowing))
            del one
            if of_rows is not None:
                of_rows[place] = found.pop(0)
            wide = [each.to(torch.promote_types(each.dtype, torch.float32)) for each in found]
            sums = [before.add_(gained) for before, gained in zip(sums, wide, strict=True)] if sums else wide
        ready = iter([total.to(each.dtype) for total, each in zip(sums, weights, strict=True)])
        return (None, None, of_rows, None, None, *[next(ready) if need else None for need in needs[5:]])
