"""Loss and feed-forward computed chunk by chunk, as people write it by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.bench.workload import Head, UnavailableError, Workload


def chunked_feed_forward(workload: Workload, chunks: str) -> None:
    """Each feed-forward in `chunks` along the sequence, each chunk checkpointed."""
    if not workload.feed_forwards:
        raise UnavailableError("has no position-wise feed-forward")
    for module, name in workload.feed_forwards:
        setattr(module, name, _in_chunks(getattr(module, name), int(chunks)))


def _in_chunks(function: Callable[[torch.Tensor], torch.Tensor], chunks: int) -> Callable[..., torch.Tensor]:
    recomputed = functools.partial(checkpoint, function, use_reentrant=False)

    def run(x: torch.Tensor) -> torch.Tensor:  # one argument: transformers counts them
        return torch.cat([recomputed(chunk) for chunk in x.chunk(chunks, 1)], 1)

    return run


def config_chunked_feed_forward(workload: Workload, size: str) -> None:
    """`chunk_size_feed_forward` of transformers: chunks of `size` tokens, nothing recomputed."""
    takers = [module for module in workload.model.modules() if hasattr(module, "chunk_size_feed_forward")]
    if not takers:
        raise UnavailableError("has no chunk_size_feed_forward")
    for module in takers:
        module.chunk_size_feed_forward = int(size)  # type: ignore[assignment]


def checkpointed_loss(workload: Workload, chunks: str) -> None:
    """Head and cross-entropy in `chunks`, each checkpointed."""
    head, count = _head(workload), int(chunks)

    def total(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(head.linear(hidden), targets, reduction="sum")

    def forward() -> torch.Tensor:
        pairs = zip(head.hidden().chunk(count), head.targets.chunk(count), strict=True)
        losses = [checkpoint(total, hidden, targets, use_reentrant=False) for hidden, targets in pairs]
        return torch.stack(losses).sum() / (head.targets != -100).sum()

    workload.forward = forward


def loss_in_forward(workload: Workload, chunks: str) -> None:
    """Head and cross-entropy in `chunks`, whose gradients are computed in the forward: nothing is done twice."""
    head, count = _head(workload), int(chunks)
    workload.forward = lambda: _LossInForward.apply(head.hidden(), head.linear.weight, head.targets, count)


def _head(workload: Workload) -> Head:
    if workload.head is None:
        raise UnavailableError("has no head over a vocabulary")
    assert workload.head.linear.bias is None
    return workload.head


class _LossInForward(torch.autograd.Function):
    """Mean cross-entropy of `hidden @ weight.T`; the logits of one chunk are all that is ever held of them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: nn.Parameter, targets: torch.Tensor, chunks: int
    ) -> torch.Tensor:
        count = (targets != -100).sum()
        loss, of_hidden, of_weight = hidden.new_zeros(()), torch.empty_like(hidden), torch.zeros_like(weight)
        parts = zip(hidden.chunk(chunks), targets.chunk(chunks), of_hidden.chunk(chunks), strict=True)
        for rows, wanted, gradient in parts:
            logits = rows @ weight.t()
            logits -= logits.amax(1, keepdim=True)
            asked, place = wanted != -100, wanted.clamp(min=0)[:, None]
            chosen = logits.gather(1, place)
            sums = logits.exp_().sum(1, keepdim=True)
            loss += ((sums.log() - chosen)[:, 0] * asked).sum()
            logits /= sums  # now the softmax
            logits.scatter_add_(1, place, torch.full_like(chosen, -1.0))
            logits *= (asked / count)[:, None]
            torch.mm(logits, weight, out=gradient)
            of_weight.addmm_(logits.t(), rows)
            del logits
        ctx.gradients = [of_hidden, of_weight]  # not saved tensors: handed over, so that autograd need not copy them
        return loss / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[Any, ...]:
        of_hidden, of_weight = ctx.gradients
        del ctx.gradients
        return of_hidden.mul_(upstream), of_weight.mul_(upstream), None, None
