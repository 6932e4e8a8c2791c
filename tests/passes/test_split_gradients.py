"""SplitGradients: where it copies, what that frees, and that no bit changes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import rewrite
from passes import Checkpoint, MixedPrecision, SplitGradients, own_gradient
from passes.gradient_layout import CONVOLVING_LAYERS, HANDING_LAYERS, READING_LAYERS
from rewrite import pipeline
from rewrite.memory.allocator import allocated_peak_bytes
from rewrite.text import program_text
from tests.passes.joined import Added, DenseNet, Joined, PassedSkips, images, unet
from tests.zoo import ZOO
from tests.zoo.compare import assert_equal, run

ORDERS = [[SplitGradients(), Checkpoint()], [Checkpoint(), SplitGradients()]]


def split(model: nn.Module, inputs: Any, *more: rewrite.Pass) -> nn.Module:
    return rewrite.optimize(model, passes=[SplitGradients(), *more], example_inputs=inputs)


def pixels(batch: int = 3, side: int = 8) -> torch.Tensor:
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(2))


def grads(model: nn.Module, inputs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def assert_same(model: nn.Module, small: nn.Module, inputs: Any) -> None:
    expected, found = grads(model, inputs), grads(small, inputs)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


# That no bit changes.


@pytest.mark.parametrize("passes", [[SplitGradients()], *ORDERS], ids=str)
def test_loss_and_gradients_of_a_unet_with_dropout_are_eagers(passes: list[rewrite.Pass]) -> None:
    entry = ZOO["plain-unet"]
    model, inputs = entry.build(), entry.inputs(*entry.shapes[0], entry.masks[0])
    small = rewrite.optimize(model, passes=passes, example_inputs=inputs)
    assert sum("are copies" in change.summary for change in rewrite.report(small).changes) == 3
    for shape, train in zip(entry.shapes, (True, False), strict=True):
        batch = entry.inputs(*shape, entry.masks[0])
        assert_equal(run(model, batch, 7, train), run(small, batch, 7, train))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_channels_last(dtype: torch.dtype) -> None:
    model = unet().to(dtype).to(memory_format=torch.channels_last)
    inputs = {name: each.to(dtype).contiguous(memory_format=torch.channels_last) for name, each in images().items()}
    assert_same(model, split(model, inputs), inputs)


@pytest.mark.parametrize("passes", [[SplitGradients()], *ORDERS], ids=str)
def test_a_second_derivative_is_eagers(passes: list[rewrite.Pass]) -> None:
    model = Joined(nn.SiLU())
    small = rewrite.optimize(model, passes=passes, example_inputs=pixels())
    found = []
    for each in (model, small):
        each.zero_grad()
        torch.manual_seed(3)
        first = torch.autograd.grad(each(pixels()), list(each.parameters()), create_graph=True)
        sum(grad.pow(2).sum() for grad in first).backward()
        found.append([parameter.grad.clone() for parameter in each.parameters()])
    assert all(map(torch.equal, *found))


def test_two_backwards_through_one_forward() -> None:
    model = Joined(nn.SiLU())
    found = []
    for each in (model, split(model, pixels())):
        each.zero_grad()
        torch.manual_seed(3)
        loss = each(pixels())
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([parameter.grad.clone() for parameter in each.parameters()])
    assert all(map(torch.equal, *found))


def test_without_gradients_nothing_is_added() -> None:
    model = unet()
    small = split(model, images())
    with torch.no_grad():
        assert torch.equal(model(**images()), small(**images()))
        assert own_gradient.own_gradient(tensor := torch.ones(2, requires_grad=True)) is tensor
    assert own_gradient.own_gradient(tensor := torch.ones(2)) is tensor


def test_what_waits_twice_is_added_up_in_the_same_order() -> None:
    """Two parts that are one tensor, which has a gradient from a use before: (a + b) + c, not a + (b + c)."""

    def join(late: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        scale = torch.linspace(0.1, 7.0, 32).view(1, -1, 1, 1)
        return torch.cat([late, skip, late * 1.5, skip], 1) * scale

    model = Joined(nn.SiLU(), join)
    small = split(model, pixels())
    (change,) = rewrite.report(small).changes
    assert "gradients of 2 of 4 parts" in change.summary
    assert_same(model, small, pixels())


def test_in_half_precision_as_without_copies() -> None:
    """Its layers are functions of cast weights in the graph by then."""
    model, half = Joined(nn.SiLU()), MixedPrecision("O2", dtype="bf16")
    plain = rewrite.optimize(model, [half], example_inputs=pixels())
    small = split(model, pixels(), half)
    assert any("are copies" in change.summary for change in rewrite.report(small).changes)
    assert_same(plain, small, pixels())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", [*READING_LAYERS, *CONVOLVING_LAYERS, *HANDING_LAYERS], ids=lambda kind: kind.__name__)
def test_every_layer_that_may_read_a_copy_gives_the_same_bits(kind: type[nn.Module], batch: int) -> None:
    if kind in (nn.Flatten, nn.Unflatten):
        pytest.skip("only views")
    depth = next((digit for digit in (1, 2, 3) if f"{digit}d" in kind.__name__), 2)
    shape = (batch, 8, *[6] * depth)
    arguments: dict[type[nn.Module], tuple[Any, ...]] = {nn.GroupNorm: (4, 8), nn.LayerNorm: (6,)}
    arguments[nn.Upsample] = (None, 2.0)
    if "Conv" in kind.__name__ or "Pool" in kind.__name__:
        arguments[kind] = (8, 8, 3, 1, 1) if "Conv" in kind.__name__ else (3, 1, 1)
    layer = kind(*arguments.get(kind, ()))
    joint = torch.randn(batch, 24, *layer(torch.randn(shape)).shape[2:])
    found = []
    for grad in (joint[:, :8], own_gradient.without_the_rest(joint[:, :8])):
        torch.manual_seed(0)
        x = torch.randn(shape, requires_grad=True)
        layer.zero_grad()
        layer(x).backward(grad)
        found.append([x.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
    assert all(map(torch.equal, *found))


# What it frees.


@pytest.mark.parametrize("more", [[], [Checkpoint()]], ids=str)
def test_the_peak_falls_by_what_goes_early(more: list[rewrite.Pass]) -> None:
    """At the peak, in the middle of the way down, the two outer skips wait."""
    freed = (2 * 64 * 16 * 16 + 2 * 32 * 32 * 32) * 4
    model = unet()
    plain, small = rewrite.optimize(model, more, example_inputs=images()), split(model, images(), *more)
    told = [change.summary for change in rewrite.report(small).changes if "are copies" in change.summary]
    assert [summary.split("so that ")[1].split(" bytes")[0] for summary in told] == ["65,536", "131,072", "262,144"]
    before, after = (rewrite.estimate(each, images()).peak_bytes for each in (plain, small))
    assert before - after == freed == 393_216
    allocated = [allocated_peak_bytes(each, images()) for each in (plain, small)]
    assert allocated[0] - allocated[1] == pytest.approx(freed, rel=0.02)


def test_a_gradient_that_is_whole_is_not_copied() -> None:
    whole, part = torch.ones(4), torch.ones(8)[:4]
    assert own_gradient.without_the_rest(whole) is whole
    assert own_gradient.without_the_rest(part).untyped_storage().nbytes() == 16


def test_the_planner_goes_below_what_recompute_reaches_alone() -> None:
    with pytest.raises(rewrite.BudgetError) as low:
        rewrite.plan(unet(), "1MiB", images())
    with pytest.raises(rewrite.BudgetError) as alone:
        rewrite.optimize(unet(), "checkpoint{budget=1MiB}", example_inputs=images())
    assert "split-gradients" in str(low.value)
    # 289 KiB; identities that copy nothing come 128 KiB lower than recompute alone.
    assert alone.value.lowest_bytes - low.value.lowest_bytes >= 256 * 2**10


# Where.


def summaries(model: nn.Module, inputs: Any) -> list[str]:
    return [f"{change.path}: {change.summary}" for change in rewrite.report(split(model, inputs)).changes]


def refusals(model: nn.Module, inputs: Any) -> list[str]:
    report = rewrite.report(split(model, inputs))
    assert not report.changes
    return [refusal.reason for refusal in report.refusals]


@pytest.mark.parametrize("name", ["concat", "concatenate", "hstack", "stack"])
def test_other_names_of_concatenation(name: str) -> None:
    joining = getattr(torch, name)
    model = Joined(nn.SiLU(), lambda late, skip: joining((late, skip)))
    assert len(summaries(model, pixels())) == 1
    assert_same(model, split(model, pixels()), pixels())


def test_parts_given_by_name_and_as_views() -> None:
    model = Joined(nn.SiLU(), lambda late, skip: torch.cat(dim=-1, tensors=[late.flatten(1), skip.flatten(1)]))
    assert len(summaries(model, pixels())) == 1
    assert_same(model, split(model, pixels()), pixels())


def test_skips_that_are_inputs_of_the_block_that_joins_them() -> None:
    model = PassedSkips()
    assert [each.split(":")[0] for each in summaries(model, pixels())] == ["up.0", "up.1"]
    for side in (8, 12):
        assert_same(model, split(model, pixels()), pixels(side=side))
        assert_same(model, split(model, pixels(), Checkpoint()), pixels(side=side))


def test_an_input_whose_maker_sums_as_its_gradient_lies() -> None:
    """The first skip is a batch norm's, the second a SiLU's."""
    report = rewrite.report(split(PassedSkips(lambda: nn.BatchNorm2d(8)), pixels()))  # type: ignore[arg-type]
    assert [change.path for change in report.changes] == ["up.0"]
    assert "BatchNorm2d 'early'" in report.refusals[0].reason


@pytest.mark.parametrize(
    ("early", "culprit"),
    [(nn.BatchNorm2d(8), "BatchNorm2d 'early'"), (Added(8), "add"), (nn.Sequential(Added(1), nn.Dropout(0.1)), "add")],
    ids=["batch norm", "bias", "bias and dropout"],
)
def test_what_would_add_up_in_another_order_is_left_alone(early: nn.Module, culprit: str) -> None:
    (reason,) = refusals(Joined(early), pixels())
    assert reason.startswith("part 1 of cat (joined.py:")
    assert f"waits in the backward, but {culprit}" in reason
    assert reason.endswith("is a copy; it is left a part of the joint gradient")


class Heads(nn.Module):
    """The heads of two levels, whose results are joined."""

    def __init__(self, join: Callable[[list[torch.Tensor]], torch.Tensor], *, bias: bool = True) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.heads = nn.ModuleList(nn.Conv2d(8, 8, 1, bias=bias) for _ in range(2))
        self.join = join

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = functional.gelu(self.stem(x))
        early = self.heads[0](first)
        late = self.heads[1](functional.gelu(self.middle(first)))
        return self.join([late, early]).tanh().pow(3).sum()


JOINS: dict[str, Any] = {
    "rows": lambda parts: torch.cat(parts, -1),
    "anchors": lambda parts: torch.cat([part.permute(0, 2, 3, 1).flatten(1, 2) for part in parts], 1),
    "new dimension": lambda parts: torch.stack(parts, -1),
}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("join", JOINS)
def test_the_bias_of_a_convolution_sums_as_the_gradient_lies(join: str, batch: int) -> None:
    (reason,) = refusals(Heads(JOINS[join]), pixels(batch))
    assert "waits in the backward, but Conv2d 'heads.0'" in reason
    assert "may add up its gradient in another order" in reason
    model = Heads(JOINS[join], bias=False)
    small = split(model, pixels(batch))
    assert not rewrite.report(small).refusals
    assert_same(model, small, pixels(batch))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("batch", [1, 4])
def test_the_bias_of_a_convolution_sums_a_part_of_the_channels_alike(batch: int, layout: torch.memory_format) -> None:
    """Of a single image too, where the strides of the batch alone tell one layout from the other."""
    model = Heads(lambda parts: torch.cat(parts, 1)).to(memory_format=layout)  # type: ignore[call-overload]
    x = pixels(batch).contiguous(memory_format=layout)
    small = split(model, x)
    assert not rewrite.report(small).refusals
    assert_same(model, small, x)


def test_a_fresh_part_is_left_alone() -> None:
    model = Joined(nn.SiLU(), lambda late, skip: torch.cat([late, -late], 1) + skip.mean())
    assert refusals(model, pixels()) == [
        "no concatenation in the model has a part whose gradient waits while that of a later one is used"
    ]


def test_a_part_that_is_used_after_gets_its_sum_at_once() -> None:
    assert refusals(Joined(nn.SiLU(), lambda late, skip: torch.cat([late, skip], 1).mean() + skip.mean()), pixels())


@pytest.mark.parametrize(("growing", "copied"), [(True, "12,288"), (False, "30,720")])
def test_copies_that_take_more_than_they_free_are_not_made(growing: bool, copied: str) -> None:
    model = DenseNet(growing)
    reasons = refusals(model, pixels())
    assert reasons[0].startswith("cat (joined.py:")
    assert any(f"take {copied} bytes" in reason for reason in reasons)
    assert all(reason.endswith("would let no more than 6,144 bytes of it go early") for reason in reasons)
    assert_same(model, split(model, pixels()), pixels())


def test_a_dense_stack_whose_layers_make_as_much_as_they_are_given() -> None:
    """The first layer's; later ones make less than they are given."""
    model = DenseNet(growing=True, growth=16)
    assert [each.split(" so that ")[1].split()[0] for each in summaries(model, pixels())] == ["12,288"]
    for passes in ([SplitGradients()], *ORDERS):
        assert_same(model, rewrite.optimize(model, passes=passes, example_inputs=pixels()), pixels())


def test_a_language_model_has_nothing_that_waits() -> None:
    entry = ZOO["llama"]
    assert refusals(entry.build(), entry.inputs(*entry.shapes[0], entry.masks[0])) == [
        "no concatenation in the model has a part whose gradient waits while that of a later one is used"
    ]


def test_a_frozen_skip_has_no_gradient_to_copy() -> None:
    model = Joined(nn.SiLU())
    model.stem.requires_grad_(False)
    assert refusals(model, pixels())


def test_a_second_time_changes_nothing() -> None:
    program = rewrite.capture(unet(), images())
    first, second = (step.result for step in pipeline.run(program, [SplitGradients(), SplitGradients()]).steps)
    assert len(first.changes) == 3
    assert not second.modified
    assert not second.changes
    assert not second.refusals
    assert program_text(first.program) == program_text(second.program)
    assert SplitGradients().offers(program) == (SplitGradients(),)
    assert not SplitGradients().offers(first.program)


# What stands in the graph.


def test_the_rewritten_model_is_copied_and_pickled() -> None:
    model = unet()
    small = split(model, images())
    for other in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert_same(model, other, images())


def test_the_identity_under_transforms() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x * 2, y]).pow(3).sum()

    def joined(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([own_gradient.own_gradient(x * 2), y]).pow(3).sum()

    assert torch.equal(torch.func.grad(plain)(x), torch.func.grad(joined)(x))
    assert torch.allclose(torch.func.vmap(torch.func.grad(joined))(torch.stack([x, y]))[1], torch.func.grad(plain)(y))
    assert torch.allclose(torch.func.jvp(joined, (x,), (y,))[1], torch.func.jvp(plain, (x,), (y,))[1])
