"""What a convolution takes below the dispatcher, against the allocator's own account of the same call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rewrite
from rewrite.memory.allocator import allocated_peak_bytes, allocated_rise_bytes
from rewrite.memory.scratch import scratch_bytes

aten = torch.ops.aten
SHAPES = {
    "plain": (16, 32, 3, 1, 1, 1),
    "strided": (16, 32, 3, 2, 1, 1),
    "pointwise": (16, 32, 1, 1, 0, 1),
    "strided-pointwise": (16, 32, 1, 2, 0, 1),
    "padded-pointwise": (16, 32, 1, 1, 1, 1),
    "grouped": (16, 16, 3, 1, 1, 4),
    "depthwise": (16, 16, 3, 1, 1, 16),
}


@pytest.mark.parametrize("masks", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_convolution_in_half_takes_its_patches(shape: str, dtype: torch.dtype, masks: tuple[bool, bool]) -> None:
    ops, name = torch.ops.mkldnn, "fp16" if dtype is torch.float16 else "bf16"
    if getattr(ops, f"_is_mkldnn_{name}_supported")():
        pytest.skip(f"oneDNN has {name} on this processor")
    torch.set_num_threads(1)
    inside, outside, kernel, stride, padding, groups = SHAPES[shape]
    x = torch.randn(4, inside, 20, 20).to(dtype)
    weight = torch.randn(outside, inside // groups, kernel, kernel).to(dtype)
    options = (None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    made = aten.convolution(x, weight, *options)
    taken = allocated_rise_bytes(lambda: aten.convolution(x, weight, *options))
    assert scratch_bytes(aten.convolution.default, (x, weight, *options), made) == taken - made.nbytes

    grad = torch.ones_like(made)
    back = (grad, x, weight, *options, [*masks, False])
    gradients = aten.convolution_backward(*back)
    taken = allocated_rise_bytes(lambda: aten.convolution_backward(*back))
    results = sum(each.nbytes for each in gradients if each is not None)
    found = scratch_bytes(aten.convolution_backward.default, back, gradients)
    assert found == taken - results


CHANNELS = (
    (3, 8, 3),
    (3, 16, 7),
    (4, 8, 3),
    (8, 4, 3),
    (8, 16, 3),
    (16, 8, 3),
    (12, 12, 3),
    (20, 20, 3),
    (24, 24, 3),
    (5, 9, 5),
)


@pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX512"), reason="blocks of 16 channels are AVX-512's"
)
@pytest.mark.parametrize(("inside", "outside", "kernel"), CHANNELS)
def test_blocks_of_channels_are_filled_up(inside: int, outside: int, kernel: int) -> None:
    x, weight = torch.randn(4, inside, 20, 20), torch.randn(outside, inside, kernel, kernel)
    options = (None, [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
    made = aten.convolution(x, weight, *options)
    taken = allocated_rise_bytes(lambda: aten.convolution(x, weight, *options))
    assert scratch_bytes(aten.convolution.default, (x, weight, *options), made) == pytest.approx(
        taken - made.nbytes, abs=512
    )
    for masks in ((True, False), (False, True), (True, True)):
        back = (torch.ones_like(made), x, weight, *options, [*masks, False])
        gradients = aten.convolution_backward(*back)
        taken = allocated_rise_bytes(lambda back=back: aten.convolution_backward(*back))
        results = sum(each.nbytes for each in gradients if each is not None)
        found = scratch_bytes(aten.convolution_backward.default, back, gradients)
        assert found == pytest.approx(taken - results, rel=0.02, abs=512)


ATTENTION = {
    "short": (100, 100, 32),
    "middle": (300, 300, 64),
    "long": (1000, 1000, 64),
    "few keys": (1000, 200, 64),
    "many keys": (600, 1500, 80),
}


@pytest.mark.parametrize("rowwise", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", ATTENTION)
def test_attention_takes_a_tile_for_each_thread(shape: str, dtype: torch.dtype, rowwise: bool) -> None:
    queries, keys, width = ATTENTION[shape]
    query = torch.randn(2, 4, queries, width, dtype=dtype)
    key, value = torch.randn(2, 2, 4, keys, width, dtype=dtype)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    result, sums = forward(query, key, value)
    taken = allocated_rise_bytes(lambda: forward(query, key, value)) - result.nbytes - sums.nbytes
    assert scratch_bytes(forward, (query, key, value), (result, sums)) == taken

    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    grad = torch.ones(2, queries, 4, width, dtype=dtype).transpose(1, 2)
    given = (grad if rowwise else grad.contiguous(), query, key, value, result, sums, 0.0, False)
    made = backward(*given)
    taken = allocated_rise_bytes(lambda: backward(*given)) - sum(each.nbytes for each in made)
    assert scratch_bytes(backward, given, made) == taken


class Joined(nn.Module):
    """Two convolutions of a part of the input, joined: the gradient of each is a part too."""

    def __init__(self, along: int, cut: int) -> None:
        super().__init__()
        self.along, self.cut = along, cut
        self.left, self.right = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = torch.cat([x, x], self.cut).chunk(2, self.cut)[0]
        return torch.cat([self.left(part), self.right(part)], self.along).sum()


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("cut", [0, 1, 2])
@pytest.mark.parametrize("along", [0, 1, 2, 3])
def test_a_convolution_makes_a_part_dense_first(along: int, cut: int, batch: int) -> None:
    model, x = Joined(along, cut), torch.randn(batch, 16, 40, 40)
    expected = allocated_peak_bytes(model, x)
    assert abs(rewrite.estimate(model, x).peak_bytes / expected - 1) < 0.005
