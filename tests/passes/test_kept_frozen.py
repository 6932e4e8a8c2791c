"""Which frozen values a recomputed part has kept for it, and which it makes again."""

from __future__ import annotations

import torch
from torch import nn

import rewrite
from passes import Checkpoint, DetachFrozen
from passes.kept_frozen import kept_frozen
from rewrite import DETACH, RECOMPUTE, pipeline
from tests.zoo.compare import assert_equal, run


class Widened(nn.Module):
    """A frozen product, and frozen values that are cheap to make: one wider than what it is made of, one not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.frozen = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.requires_grad_(False)
        self.trained = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        looked_up = self.embedding(ids)
        active = torch.tanh(self.frozen(looked_up))
        wide = torch.outer(ids[:, 0].float(), torch.ones(64))
        value = self.trained(active.exp()) * self.trained(looked_up)
        return torch.tanh(value.sum() * wide.sum() + value.sin().sum())


def tagged() -> rewrite.Region:
    program = rewrite.capture(Widened(), torch.randint(0, 9, (4, 3)))
    return pipeline.run(program, [DetachFrozen()]).program.region("")


def test_products_are_kept_and_what_follows_at_no_more_bytes() -> None:
    region = tagged()
    frozen = {node.name for node in region.nodes() if DETACH in node.meta}
    kept = {node.name for node in kept_frozen(region)}
    assert {"embedding", "frozen", "tanh", "exp"} <= kept  # what the product reads is there, and free to keep
    assert kept <= frozen


class Mask(nn.Module):
    """A frozen mask, widened, in front of a trained layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1), requires_grad=False)
        self.trained = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        mask = (keep * self.scale)[:, None, :] * torch.ones(16, 1)
        return (torch.tanh(self.trained(x)) * mask).sum()


class Outer(nn.Module):
    """A model of that one part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Mask()

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return self.part(x, keep).sin()


def test_what_is_wider_than_its_sources_is_made_again() -> None:
    model, inputs = Outer(), {"x": torch.randn(4, 16, 16), "keep": torch.ones(4, 16)}
    passes = [DetachFrozen(), Checkpoint(select="part")]
    region = pipeline.run(rewrite.capture(model, inputs), passes).program.region("")
    again = {node.name for node in region.nodes() if RECOMPUTE in node.meta and DETACH in node.meta}
    once = {node.name for node in kept_frozen(region)}
    wide = [
        node.name for node in region.nodes() if getattr(node.meta.get("val"), "ndim", 0) == 3 and DETACH in node.meta
    ]
    assert wide[-1] in again
    assert wide[-1] not in once
    small = rewrite.optimize(model, passes, example_inputs=inputs)
    assert_equal(run(model, inputs), run(small, inputs))
    saved = rewrite.estimate(small, inputs).saved_bytes
    assert (
        saved < rewrite.estimate(rewrite.optimize(model, [DetachFrozen()], example_inputs=inputs), inputs).saved_bytes
    )
