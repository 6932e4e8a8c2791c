"""Reports of a recompute that drew other random numbers than the forward, or stored noise."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import rewrite
from passes import Checkpoint
from tests.cases.recomputed import SPECS, assert_recomputed
from tests.zoo.compare import assert_equal, run

WIDTH = 32


class TanhDropout(nn.Module):
    """`dropout(tanh(x @ W.T))`, whose mask can be read off its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.linear(hidden)))


class LinearDropout(nn.Module):
    """`dropout(x @ W.T + b)`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.linear(hidden), 0.5, self.training)


class Stack(nn.Module):
    """Blocks in a row; gives what each of them made."""

    def __init__(self, kind: type[nn.Module], count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(count))

    def forward(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        made = []
        for block in self.blocks:
            hidden = block(hidden)
            made.append(hidden)
        return made


BUDGETS = (*SPECS, "checkpoint{every=2}", "checkpoint{select=blocks.3}", "checkpoint{select=blocks.*.dropout}")
"""From everything recomputed to little."""


@pytest.mark.thinned(4)
@pytest.mark.parametrize("spec", BUDGETS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_recomputed_dropout_keeps_its_mask(spec: str, seed: int) -> None:
    """pytorch/pytorch#190758: a fresh mask is drawn in the recompute, under whatever budget."""
    model, hidden = Stack(TanhDropout), torch.randn(64, WIDTH, requires_grad=True)
    small = rewrite.optimize(model, spec, example_inputs=hidden)
    assert_recomputed(small, "blocks.*")
    torch.manual_seed(seed)
    made = small(hidden)
    torch.manual_seed(99)
    made[-1].sum().backward()

    inputs = [hidden, *made]
    back = torch.ones_like(hidden)
    for place in reversed(range(4)):
        weight, given, mask = model.blocks[place].linear.weight, inputs[place].detach(), made[place] != 0
        back = back * mask * 2 * (1 - torch.tanh(given @ weight.T) ** 2)
        torch.testing.assert_close(weight.grad, back.T @ given)
        back = (back @ weight).detach()
        assert 0.4 < mask.float().mean() < 0.6
    torch.testing.assert_close(hidden.grad, back)


@pytest.mark.parametrize("spec", SPECS)
def test_dropout_drops_the_same_in_both_passes(spec: str) -> None:
    """openai/guided-diffusion#167: the state of the generator is not kept for the recompute."""
    model, hidden = Stack(LinearDropout), torch.randn(64, WIDTH)
    small = rewrite.optimize(model, spec, example_inputs=hidden)
    assert_recomputed(small, "blocks.2", "blocks.3")
    made = small(hidden)
    torch.rand(17)  # somebody draws in between
    made[-1].sum().backward()
    last = 2.0 * (made[3] != 0)
    before = 2.0 * (made[2] != 0) * (last @ model.blocks[3].linear.weight)
    torch.testing.assert_close(model.blocks[3].linear.bias.grad, last.sum(0))
    torch.testing.assert_close(model.blocks[2].linear.bias.grad, before.sum(0))


@pytest.mark.parametrize("spec", SPECS)
def test_the_generator_goes_on_as_if_nothing_were_recomputed(spec: str) -> None:
    """openai/guided-diffusion#167: what is drawn after the backward is what the plain model's user would draw."""
    model, hidden = Stack(TanhDropout), torch.randn(4, WIDTH)
    small = rewrite.optimize(model, spec, example_inputs=hidden)
    drawn = []
    for module in (model, small):
        torch.manual_seed(3)
        for _ in range(2):
            module(hidden)[-1].sum().backward()
            drawn.append(torch.rand(3))
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])


class Noisy(nn.Module):
    """A linear layer and RReLU, the last operation of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = nn.RReLU()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(hidden))


class NoisyFunction(Noisy):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rrelu(self.linear(hidden), training=self.training)


class NoisyInPlace(Noisy):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rrelu_(self.linear(hidden), training=self.training)


class NoisyInside(Noisy):
    """RReLU two modules down."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Sequential(nn.Sequential(nn.RReLU()))


class Squared(nn.Module):
    """The mean square of a stack's last value."""

    def __init__(self, kind: type[nn.Module], count: int = 5) -> None:
        super().__init__()
        self.stack = Stack(kind, count)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.stack(hidden)[-1].pow(2).mean()


@pytest.mark.thinned(8)
@pytest.mark.parametrize("spec", [*SPECS, "checkpoint{select=stack.blocks.*}"])
@pytest.mark.parametrize("kind", [Noisy, NoisyFunction, NoisyInPlace, NoisyInside])
def test_rrelu_at_the_end_of_a_segment_stores_no_noise(kind: type[nn.Module], spec: str) -> None:
    """pytorch/pytorch#193671: RReLU last in a recomputed span stores noise, gradients of 1e38."""
    model, hidden = Squared(kind), torch.randn(8, WIDTH)
    small = rewrite.optimize(model, spec, example_inputs=hidden)
    assert_recomputed(small, *(f"stack.blocks.{place}" for place in range(5)))
    for seed in (0, 1):
        assert_equal(run(model, {"hidden": hidden}, seed), run(small, {"hidden": hidden}, seed))


@pytest.mark.parametrize("checkpoint", [Checkpoint(policy="sqrt"), Checkpoint(select=("0", "1", "2"))], ids=str)
def test_rrelu_in_a_sequence_stores_no_noise(checkpoint: Checkpoint) -> None:
    """pytorch/pytorch#193671, as reported: `Sequential(Linear, RReLU)`."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU()) for _ in range(3)))
    hidden = torch.randn(4, WIDTH, requires_grad=True)
    small = rewrite.optimize(model, [checkpoint], example_inputs=hidden)
    assert_recomputed(small, "2.*")
    grads = []
    for module in (model, small):
        torch.manual_seed(5)
        grads.append(torch.autograd.grad(module(hidden).pow(2).sum(), [hidden, *module.parameters()]))
    assert all(map(torch.equal, *grads))


class CheckpointedNoisy(Noisy):
    """A block that its author recomputes."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, hidden, use_reentrant=False)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("spec", ["", *SPECS])
def test_rrelu_in_a_part_the_model_recomputes_itself_stores_no_noise(spec: str) -> None:
    """pytorch/pytorch#193671: torch's own checkpoint stores noise there; the rewritten model does not."""
    plain, model, hidden = Squared(Noisy), Squared(CheckpointedNoisy), torch.randn(8, WIDTH)
    small = rewrite.optimize(model, spec, example_inputs=hidden)
    for seed in (0, 1):
        assert_equal(run(plain, {"hidden": hidden}, seed), run(small, {"hidden": hidden}, seed))
