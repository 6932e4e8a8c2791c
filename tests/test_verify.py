"""`verify` passes on equal modules, finds each kind of difference, and leaves both modules as they were."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from rewrite.certificate import SCHEMA, Certificate
from rewrite.contract import Numerics
from rewrite.errors import InputError, VerifyError
from rewrite.inputs import as_call
from rewrite.verify import another_batch, verify
from tests.zoo import ZOO
from tests.zoo.plain import GatedBlock

IMAGES = ZOO["plain-resnet"].inputs(3, 8)


def shared_copy(module: nn.Module) -> nn.Module:
    """A structural copy that shares every parameter and buffer, as a rewrite makes it."""
    held = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in held})


def kinds(certificate: Certificate) -> set[str]:
    return {row.kind for row in certificate.failures}


@pytest.mark.parametrize("name", ["bert", "llama", "mixtral", "t5", "wav2vec2", "plain-branching", "torch-lstm"])
def test_equal_modules_pass(name: str) -> None:
    entry = ZOO[name]
    model = entry.build()
    certificate = verify(model, shared_copy(model), entry.inputs(*entry.shapes[0], entry.masks[0]))
    assert certificate.passed, certificate.summary
    assert len(certificate.cases) == 4
    assert not certificate.skipped
    assert {"loss", "gradient", "rng", "structure", "identity"} <= {row.kind for row in certificate.rows}
    assert certificate.summary.endswith("bit-equal")


def test_a_copy_with_weights_of_its_own_passes_when_they_are_equal() -> None:
    model = ZOO["plain-resnet"].build()
    other = copy.deepcopy(model)
    assert verify(model, other, IMAGES).passed
    with torch.no_grad():
        other.head.bias[0] += 1
    assert "identity" in kinds(verify(model, other, IMAGES))


def _other_gradient(model: nn.Module) -> None:
    model.head.register_full_backward_hook(lambda *_: (torch.zeros(3, 32),))


def _forgotten_gradient(model: nn.Module) -> None:
    model.head.register_forward_hook(lambda _, __, output: output.detach().requires_grad_())


def _extra_draw(model: nn.Module) -> None:
    forward = model.head.forward
    model.head.forward = lambda hidden: forward(hidden) + 0 * torch.rand(())


def _statistics_twice(model: nn.Module) -> None:
    forward = model.stem.forward
    model.stem.forward = lambda pixels: (forward(pixels), forward(pixels))[1]


def _dropout_stuck(model: nn.Module) -> None:
    model.dropout.p = 0.9


def _untied(model: nn.Module) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def _extra_key(model: nn.Module) -> None:
    model.register_buffer("extra", torch.zeros(1))


def _raises(model: nn.Module) -> None:
    def forward(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel")

    model.head.forward = forward


@pytest.mark.parametrize(
    ("sabotage", "kind"),
    [
        (_other_gradient, "gradient"),
        (_forgotten_gradient, "gradient"),
        (_extra_draw, "rng"),
        (_statistics_twice, "buffer"),
        (_dropout_stuck, "loss"),
        (_untied, "identity"),
        (_extra_key, "structure"),
        (_raises, "error"),
    ],
)
def test_each_kind_of_difference_is_found(sabotage: Callable[[nn.Module], None], kind: str) -> None:
    model = ZOO["plain-resnet"].build()
    other = shared_copy(model)
    sabotage(other)
    certificate = verify(model, other, IMAGES)
    assert not certificate.passed
    assert kind in kinds(certificate)
    assert certificate.summary.startswith("differs: ")


def test_a_fault_in_eval_mode_or_at_another_batch_size_is_found() -> None:
    model = ZOO["plain-unet"].build()
    inputs = ZOO["plain-unet"].inputs(3, 16)
    other = shared_copy(model)
    forward = other.head.forward
    other.head.forward = lambda hidden: forward(hidden) * (1.0 if other.training or len(hidden) == 3 else 2.0)
    cases = {row.case for row in verify(model, other, inputs).failures}
    assert cases == {"eval, batch 2, seed 0"}


def test_hook_calls_are_counted() -> None:
    model = ZOO["plain-resnet"].build()
    model.head.register_forward_hook(lambda *_: None)
    other = shared_copy(model)
    assert "hook" in {row.kind for row in verify(model, other, IMAGES).rows}
    other.dropout.register_forward_hook(lambda _, __, output: output)
    other.dropout.forward = lambda hidden: (other.head(hidden), hidden)[1]
    failures = [row for row in verify(model, other, IMAGES).failures if row.kind == "hook"]
    assert failures
    assert failures[0].note == "called 2 times, not 1"


def test_both_modules_are_left_as_they_were() -> None:
    model = ZOO["plain-resnet"].build()
    other = shared_copy(model)
    other.eval()
    marker = torch.ones_like(model.head.weight)
    model.head.weight.grad = marker
    state = copy.deepcopy(model.state_dict())
    versions = [parameter._version for parameter in model.parameters()]
    streams = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    inputs = {name: tensor.clone() for name, tensor in IMAGES.items()}
    verify(model, other, inputs, seeds=(0, 1))
    assert model.head.weight.grad is marker
    assert model.stem[0].weight.grad is None
    assert model.training
    assert not other.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert versions == [parameter._version for parameter in model.parameters()]
    assert torch.equal(streams[0], torch.get_rng_state())
    assert streams[1] == random.getstate()
    assert streams[2] == numpy.random.get_state()[1].tolist()
    assert all(torch.equal(tensor, IMAGES[name]) for name, tensor in inputs.items())
    assert not model.head._forward_pre_hooks


class Split(nn.Module):
    """A projection that sums its terms in two parts when asked to."""

    def __init__(self, halves: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.halves, self.dtype = halves, dtype
        self.block = GatedBlock(256)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.block(hidden)
        weight = self.block.up.weight.to(self.dtype)
        hidden = hidden.to(self.dtype)
        if not self.halves:
            return (hidden @ weight.T).float()
        return hidden[..., :100] @ weight[:, :100].T + hidden[..., 100:] @ weight[:, 100:].T


def _split_pair(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    model = Split(False)
    other = shared_copy(model)
    other.halves, other.dtype = dtype is torch.float32, dtype
    return model, other


def test_another_order_of_summation_passes_as_reassociated_and_not_as_exact() -> None:
    model, other = _split_pair(torch.float32)
    hidden = torch.randn(4, 9, 256)
    assert verify(model, other, hidden, numerics=Numerics.REASSOCIATED).passed
    assert not verify(model, other, hidden).passed


def test_low_precision_passes_as_reduced_only() -> None:
    model, other = _split_pair(torch.bfloat16)
    hidden = torch.randn(4, 9, 256)
    assert verify(model, other, hidden, numerics=Numerics.REDUCED).passed
    assert not verify(model, other, hidden, numerics=Numerics.REASSOCIATED).passed
    assert not verify(model, other, hidden, numerics=Numerics.REDUCED, low=torch.float32).passed


@pytest.mark.parametrize("numerics", [Numerics.REASSOCIATED, Numerics.REDUCED])
def test_a_wrong_scale_fails_under_every_numerics(numerics: Numerics) -> None:
    model = Split(False)
    other = shared_copy(model)
    forward = other.block.forward
    other.block.forward = lambda hidden: forward(hidden) * 1.5
    assert not verify(model, other, torch.randn(4, 9, 256), numerics=numerics).passed


def test_the_gradient_of_an_input_is_compared() -> None:
    model = Split(False)
    other = shared_copy(model)
    forward = other.forward
    other.forward = lambda hidden: forward(hidden) + (hidden.detach() - hidden).sum()
    names = {row.name for row in verify(model, other, torch.randn(2, 3, 256, requires_grad=True)).failures}
    assert names == {"input.0.0"}


def test_meta_modules_are_refused_with_a_way_on() -> None:
    with torch.device("meta"):
        model = GatedBlock(8)
    with pytest.raises(VerifyError, match=r"norm.weight is on the meta device.*\nNext: give the module weights"):
        verify(model, model, torch.randn(2, 8))


def test_inputs_that_the_original_refuses_are_the_callers_error() -> None:
    model = GatedBlock(8)
    with pytest.raises(InputError, match="the original module raises on the example inputs: RuntimeError"):
        verify(model, shared_copy(model), torch.randn(2, 9))


def test_a_batch_the_original_cannot_run_is_skipped_and_said() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    certificate = verify(model, shared_copy(model), torch.randn(2, 4))
    assert certificate.passed
    assert certificate.cases == ("train, batch 2, seed 0", "eval, batch 2, seed 0", "eval, batch 1, seed 0")
    assert certificate.skipped[0].startswith("train, batch 1, seed 0: ValueError: Expected more than 1 value")


def test_batches_are_resized_along_the_shared_first_dimension() -> None:
    resized = another_batch(as_call({"a": torch.zeros(3, 2), "b": [torch.zeros(3)], "c": torch.zeros(1, 3)}))
    assert resized is not None
    assert [resized[1]["a"].shape, resized[1]["b"][0].shape, resized[1]["c"].shape] == [(2, 2), (2,), (1, 3)]
    single = another_batch(as_call((torch.zeros(1, 5), 7)))
    assert single is not None
    assert single[0][0].shape == (2, 5)
    assert single[0][1] == 7
    assert another_batch(as_call({"scalar": torch.tensor(1.0)})) is None


def test_json_is_plain_and_strict() -> None:
    model = ZOO["plain-resnet"].build()
    other = shared_copy(model)
    other.head.register_forward_hook(lambda _, __, output: output / 0)
    document = verify(model, other, IMAGES).to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["schema"] == SCHEMA
    assert document["passed"] is False
    assert {"case", "kind", "name", "passed", "equal", "max_abs", "max_rel", "tolerance", "note"} == set(
        document["rows"][0]
    )
