"""Planning for CUDA counts what CUDA's kernels save, by laws of their shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from rewrite.errors import InputError
from rewrite.memory import estimate_step
from rewrite.memory.devices import STAND_INS, kernels_of
from rewrite.memory.timeline import Estimate

BATCH, HEADS, ROWS, WIDTH = 2, 4, 96, 64
VALUES = BATCH * HEADS * ROWS * WIDTH


class Apply(nn.Module):
    """Makes three tensors of its input and gives them to a function."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(())) for _ in range(3)])
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(*(x * weight for weight in self.weights)).sum()


def run(function: Callable[..., torch.Tensor], dtype: torch.dtype, device: str, **named: Any) -> Estimate:
    x = torch.ones(BATCH, HEADS, ROWS, WIDTH, dtype=dtype)
    return estimate_step(Apply(function).to(dtype), x, device=device, **named)


def attention(**named: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **named)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_flash_attention_saves_its_operands_and_one_number_a_row(dropout: float) -> None:
    estimate = run(attention(is_causal=True, dropout_p=dropout), torch.bfloat16, "cuda")
    seed_bytes = 16 + 8

    assert estimate.saved_bytes == 4 * VALUES * 2 + BATCH * HEADS * ROWS * 4 + seed_bytes


def test_flash_attention_pads_heads_to_a_multiple_of_eight() -> None:
    x = torch.ones(BATCH, HEADS, ROWS, 60, dtype=torch.bfloat16)
    estimate = estimate_step(Apply(attention()).to(torch.bfloat16), x, device="cuda")

    assert estimate.saved_bytes == 4 * VALUES * 2 + BATCH * HEADS * ROWS * 4 + 16 + 8


def test_efficient_attention_saves_the_mask_once_and_not_per_head() -> None:
    mask = torch.ones(BATCH, 1, ROWS, ROWS, dtype=torch.bool)
    with_mask = run(attention(attn_mask=mask), torch.float32, "cuda")
    without = run(attention(), torch.float32, "cuda")

    assert without.saved_bytes == 4 * VALUES * 4 + BATCH * HEADS * ROWS * 4 + 8 + 8
    assert with_mask.saved_bytes - without.saved_bytes == BATCH * ROWS * ROWS * 4


def test_attention_with_dropout_holds_no_square_matrix_on_cuda_but_does_on_cpu() -> None:
    function = attention(dropout_p=0.1)
    square_bytes = BATCH * HEADS * ROWS * ROWS * 4

    assert run(function, torch.float32, "cpu").saved_bytes > 2 * square_bytes
    assert run(function, torch.float32, "cuda").saved_bytes < 4 * VALUES * 4 + square_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_saves_one_byte_an_element(dtype: torch.dtype) -> None:
    function = lambda q, k, v: functional.dropout(q, 0.1, True)  # noqa: E731

    assert run(function, dtype, "cuda").saved_bytes == VALUES
    assert run(function, dtype, "cpu").saved_bytes == VALUES * dtype.itemsize


def test_rms_norm_saves_its_input_and_one_number_a_row() -> None:
    function = lambda q, k, v: functional.rms_norm(q, (WIDTH,))  # noqa: E731

    assert run(function, torch.bfloat16, "cuda").saved_bytes == VALUES * 2 + BATCH * HEADS * ROWS * 4


def test_multi_head_attention_is_reached_too() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    x = torch.randn(2, 256, 64)

    assert estimate_step(layer, x, device="cuda").saved_bytes < estimate_step(layer, x).saved_bytes / 2


def test_adamw_on_cuda_takes_the_foreach_path() -> None:
    built = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    cpu = estimate_step(built, torch.randn(2, 256), optimizer="adamw")
    cuda = estimate_step(built, torch.randn(2, 256), optimizer="adamw", device="cuda")
    parameter_bytes = sum(parameter.nbytes for parameter in built.parameters())

    assert cuda.peak_bytes - cpu.peak_bytes > parameter_bytes / 2


def test_real_tensors_are_left_alone() -> None:
    x = torch.ones(8, requires_grad=True)
    with kernels_of("cuda"):
        torch.manual_seed(0)
        inside = functional.dropout(x, 0.5)
    torch.manual_seed(0)

    assert torch.equal(inside, functional.dropout(x, 0.5))


def test_stand_ins_are_gone_afterwards() -> None:
    with kernels_of("cuda"):
        assert all(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutogradCPU") for name in STAND_INS)

    assert not any(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutogradCPU") for name in STAND_INS)


def test_a_report_names_its_device_and_what_it_cannot_know() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0]  # type: ignore[no-any-return]

    estimate = estimate_step(Recurrent(), torch.randn(4, 2, 8), device="cuda")

    assert estimate.device == "cuda"
    assert any("CUDA context" in sentence for sentence in estimate.not_counted)
    assert any(sentence.startswith("rnn: cuDNN") for sentence in estimate.assumptions)


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(InputError, match="device 'tpu'"):
        estimate_step(nn.Linear(2, 2), torch.randn(2, 2), device="tpu")
