"""Whatever is kept, the numbers are those of the untouched model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody has it

from tests.recompute.models import (
    BATCH,
    LENGTH,
    NOTHING,
    SOME,
    STATES,
    WIDTH,
    Block,
    Stack,
    Subset,
    assert_same,
    hidden,
    pair,
    stacks,
    step,
)  # fmt: skip

HEADS = (BATCH, LENGTH, 2, WIDTH // 2)


def heads(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(HEADS).transpose(1, 2)


def attended(value: torch.Tensor) -> torch.Tensor:
    return value.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)


def top(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    weights, places = torch.topk(value.softmax(-1), 3, -1)
    return torch.zeros_like(other).scatter(-1, places, weights) * other


def halves(value: torch.Tensor) -> torch.Tensor:
    one, other = value.chunk(2, -1)
    first, rest = torch.split(one * other.sigmoid(), [1, 3], -1)
    return torch.cat([rest.sin(), first, other.exp()], -1)


def turned(value: torch.Tensor) -> torch.Tensor:
    number = torch.complex(value, value.cos())
    number = number * number.conj() + torch.conj(number).exp()
    return torch.view_as_real(number).prod(-1).tanh()


def by_bits(value: torch.Tensor) -> torch.Tensor:
    return torch.where((value.view(torch.int32) & 1).bool(), value.sin(), value.cos())


OPERATIONS: dict[str, Any] = {
    "sin": lambda block, a, b: a.sin(),
    "exp": lambda block, a, b: a.tanh().exp(),
    "softmax": lambda block, a, b: a.softmax(-1) * F.log_softmax(b, -1),
    "cumsum": lambda block, a, b: a.tanh().cumsum(1),
    "up": lambda block, a, b: block.up(a),
    "down": lambda block, a, b: F.linear(a, block.down.weight),
    "norm": lambda block, a, b: block.norm(a),
    "batch norm": lambda block, a, b: block.batch_norm(a),
    "layer norm": lambda block, a, b: F.layer_norm(a, (WIDTH,)),
    "variance": lambda block, a, b: (a - a.mean(-1, keepdim=True)) / (a.var(-1, keepdim=True) + 1).sqrt(),
    "dropout": lambda block, a, b: F.dropout(a, 0.3, block.training),
    "dropout layer": lambda block, a, b: block.drop(a),
    "dropout of features": lambda block, a, b: F.dropout1d(a, 0.3, block.training),
    "alpha dropout": lambda block, a, b: F.alpha_dropout(a, 0.3, block.training),
    "noise": lambda block, a, b: a + torch.randn_like(b) * b + torch.rand(b.shape),
    "bernoulli": lambda block, a, b: a * torch.bernoulli(b.sigmoid()),
    "gumbel": lambda block, a, b: F.gumbel_softmax(a, hard=True, dim=-1) * b,
    "transpose": lambda block, a, b: a.transpose(1, 2).contiguous().transpose(1, 2),
    "reshape": lambda block, a, b: a.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH),
    "expand": lambda block, a, b: a.mean(1, keepdim=True).expand(-1, LENGTH, -1),
    "halves": lambda block, a, b: halves(a),
    "unbind": lambda block, a, b: torch.stack([a.unbind(1)[5].exp().tanh(), *a.unbind(1)[:5]], 1),
    "stack": lambda block, a, b: torch.stack((a, b), 0).amax(0),
    "max": lambda block, a, b: a * a.max(-1, keepdim=True)[0] + b.min(1, keepdim=True).values,
    "top": lambda block, a, b: top(a, b),
    "gather": lambda block, a, b: torch.gather(a, -1, b.argsort(-1)),
    "detach": lambda block, a, b: a.detach() * b,
    "double": lambda block, a, b: (a.double() * b.double()).float(),
    "half": lambda block, a, b: (a.bfloat16() * b.bfloat16()).float(),
    "bits": lambda block, a, b: by_bits(a),
    "complex": lambda block, a, b: turned(a),
    "fourier": lambda block, a, b: torch.fft.irfft(torch.fft.rfft(a, dim=1) * 0.5, n=LENGTH, dim=1),
    "where": lambda block, a, b: torch.where(b > 0, a, block.scale),
    "fill": lambda block, a, b: a.masked_fill(b > 0, 0.1),
    "einsum": lambda block, a, b: torch.einsum("bsd,btd->bst", a, b).tanh() @ b,
    "attention": lambda block, a, b: attended(F.scaled_dot_product_attention(heads(a), heads(b), heads(b))),
    "dropped attention": lambda block, a, b: attended(
        F.scaled_dot_product_attention(heads(a), heads(b), heads(a), dropout_p=0.2 if block.training else 0.0)
    ),
    "recurrent": lambda block, a, b: block.recurrent(a)[0],
    "embedding": lambda block, a, b: block.embedding((a[..., 0] > 0).long() + (b[..., 0] > 0).long()),
    "sum": lambda block, a, b: a + b,
    "product": lambda block, a, b: a * b,
    "product of matrices": lambda block, a, b: torch.tanh(a @ b.transpose(1, 2)) @ a,
    "fused": lambda block, a, b: torch.addcmul(a, a, b, value=0.5),
    "padded": lambda block, a, b: F.pad(a, (0, 0, 1, 0))[:, :LENGTH],
    "pooled": lambda block, a, b: F.max_unpool1d(*F.max_pool1d(a, 2, return_indices=True), 2),
}


class Drawn(nn.Module):
    """A block that runs a list of operations on values made before."""

    def __init__(self, program: tuple[tuple[str, int, int], ...]) -> None:
        super().__init__()
        self.program = program
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.batch_norm = nn.LayerNorm(WIDTH), nn.BatchNorm1d(LENGTH)
        self.drop, self.embedding = nn.Dropout(0.4), nn.Embedding(3, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        values = [hidden, self.up(hidden)]
        for name, one, other in self.program:
            values.append(OPERATIONS[name](self, values[one % len(values)], values[other % len(values)]))
        return torch.tanh(values[-1] + values[-2]) + hidden


places = st.integers(-4, 8)
programs = st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), places, places), min_size=3, max_size=9).map(tuple)
subsets = st.builds(
    Subset,
    seed=st.integers(0, 99),
    keep=st.sampled_from((0.0, 0.3, 0.7)),
    state=st.sampled_from((0.0, 0.3, 1.0)),
    release=st.sampled_from((0.0, 0.4, 1.0)),
)
FEW = settings(
    deadline=None,
    derandomize=True,
    max_examples=15,
    phases=(Phase.explicit, Phase.generate),  # an example is small already, and each try is a capture
    suppress_health_check=list(HealthCheck),
)


@FEW
@given(programs, subsets, st.lists(st.integers(0, 30), max_size=3), st.booleans())
def test_any_subset_of_any_block_keeps_the_numbers(
    program: tuple[tuple[str, int, int], ...], subset: Subset, frozen: list[int], needs_grad: bool
) -> None:
    torch.manual_seed(0)
    plain = Stack(lambda: Drawn(program))
    for place, parameter in enumerate(plain.parameters()):
        parameter.requires_grad_(place not in frozen)
    given_ = hidden().detach().requires_grad_(needs_grad)
    assume(plain(given_).requires_grad)
    plain, small = pair(plain, subset, given_)
    for seed, train in enumerate((True, False, True)):
        assert_same(step(plain, given_, seed=seed, train=train), step(small, given_, seed=seed, train=train))


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_recomputed(name: str) -> None:
    torch.manual_seed(0)
    program = ((name, 1, 0), ("product", -1, -1), (name, -1, 1), ("product", -1, 0))
    plain, small = pair(Stack(lambda: Drawn(program)), NOTHING, hidden())
    for train in (True, False):
        assert_same(step(plain, hidden(), train=train), step(small, hidden(), train=train))


def in_place(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    value = block.up(hidden) * 1.5
    value = value.add_(1)
    value += hidden
    return block.down(torch.sin(value) * value)


@pytest.mark.parametrize("subset", [NOTHING, STATES, SOME])
@pytest.mark.parametrize(
    "layer", [lambda: nn.ReLU(inplace=True), lambda: nn.Dropout(0.4, inplace=True), lambda: nn.ELU(inplace=True)]
)
def test_layers_that_write_their_input(subset: Subset, layer: Any) -> None:
    def body(block: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + block.down(block.layer(block.up(hidden) * 1.5))

    plain, small = stacks(subset, body, layer=layer)
    for train in (True, False, True):
        assert_same(step(plain, hidden(), train=train), step(small, hidden(), train=train))


@pytest.mark.parametrize("subset", [NOTHING, SOME])
def test_values_written_in_place_are_not_made_twice(subset: Subset) -> None:
    plain, small = stacks(subset, in_place)
    assert_same(step(plain, hidden()), step(small, hidden()))


LAYOUTS = {
    "plain": lambda: torch.randn(BATCH, LENGTH, WIDTH),
    "transposed": lambda: torch.randn(BATCH, WIDTH, LENGTH).transpose(1, 2),
    "transposed batch": lambda: torch.randn(LENGTH, BATCH, WIDTH).transpose(0, 1),
    "expanded": lambda: torch.randn(1, LENGTH, WIDTH).expand(BATCH, -1, -1),
    "every other": lambda: torch.randn(2 * BATCH, LENGTH, 2 * WIDTH)[::2, :, ::2],
    "longer": lambda: torch.randn(7, 3, WIDTH),
    "empty batch": lambda: torch.randn(0, LENGTH, WIDTH),
    "empty sequence": lambda: torch.randn(BATCH, 0, WIDTH),
}


def contiguous_copy(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    flat = hidden.reshape(-1, WIDTH).cos()
    return block.down(block.up(hidden.contiguous()).sin() * flat.view(hidden.shape)) + hidden.exp()


@pytest.mark.parametrize("subset", [NOTHING, SOME])
def test_inputs_of_every_layout(subset: Subset) -> None:
    """Where reshape and contiguous are a view for one call, they copy for another."""
    plain, small = stacks(subset, contiguous_copy)
    for layout in LAYOUTS.values():
        given_ = layout()
        assert_same(step(plain, given_), step(small, given_))


def test_a_double_stack_and_a_number_without_dimensions() -> None:
    def body(block: Any, hidden: torch.Tensor) -> torch.Tensor:
        scale = block.up(hidden).abs().amax()
        return hidden + block.down(torch.sin(hidden * scale) * scale.exp().log1p())

    plain, small = pair(Stack(lambda: Block(body)).double(), SOME, hidden().double())
    assert_same(step(plain, hidden().double()), step(small, hidden().double()))


class Tagged(torch.Tensor):
    """A subclass that does nothing."""


def test_an_input_of_a_subclass_and_a_parameter_as_input() -> None:
    plain, small = stacks(NOTHING)
    for given_ in (hidden().detach().as_subclass(Tagged), nn.Parameter(hidden().detach())):
        expected, found = step(plain, given_), step(small, given_)
        assert_same(expected[0], found[0])
