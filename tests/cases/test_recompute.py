"""Reports of a recompute that wrote what it must not, or left parameters without gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rewrite
from tests.cases.recomputed import SPECS, assert_recomputed
from tests.promises.pairs import names
from tests.zoo import ZOO
from tests.zoo.compare import assert_equal, run

specs = pytest.mark.parametrize("spec", SPECS)


@pytest.mark.thinned(2)
@specs
def test_batch_statistics_are_updated_once(spec: str) -> None:
    """pytorch/pytorch#96136, facebookresearch/fairscale#1035: batch norm statistics are updated twice."""
    entry = ZOO["plain-resnet"]
    inputs = entry.inputs(*entry.shapes[0])
    model, reference = entry.build(), entry.build()
    small = rewrite.optimize(model, spec, example_inputs=inputs)
    assert_recomputed(small, "stages.0.0", "stages.2.2")
    for step in (1, 2):
        for module in (reference, small):
            torch.manual_seed(step)
            module(**inputs).backward()
        expected = dict(reference.named_buffers())
        for name, buffer in small.named_buffers():
            assert torch.equal(buffer, expected[name]), name
            if name.endswith("num_batches_tracked"):
                assert buffer.item() == step, name


class Normed(nn.Module):
    """A block around a batch norm of any momentum."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=momentum)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(hidden))


@pytest.mark.thinned(6)
@specs
@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_running_mean_is_that_of_one_batch(momentum: float | None, spec: str) -> None:
    """pytorch/pytorch#96136: the value itself, also of a cumulative average, whose weight is the count of batches."""
    model = nn.Sequential(Normed(momentum), Normed(momentum))
    hidden = 3 + torch.randn(64, 4)
    small = rewrite.optimize(model, spec, example_inputs=hidden)
    if momentum is None:  # asks its buffer for a number
        assert {entry.path for entry in rewrite.report(small).opaque} >= {"0.norm", "1.norm"}
    else:
        assert_recomputed(small, "0", "1")
    small(hidden).sum().backward()
    norm = small[0].norm
    assert norm.num_batches_tracked.item() == 1
    torch.testing.assert_close(norm.running_mean, hidden.mean(0) * (1 if momentum is None else momentum))


@pytest.mark.thinned(6)
@specs
@pytest.mark.parametrize("frozen", ["before", "after"])
@names("bert", sweep=("plain-branching", "gpt2", "t5"))
def test_frozen_embeddings_still_train_the_rest(name: str, frozen: str, spec: str) -> None:
    """huggingface/transformers#21381, #23170: frozen embeddings then recompute, and no gradient at all."""
    entry = ZOO[name]
    model, inputs = entry.build(), entry.inputs(*entry.shapes[0], entry.masks[0])
    assert not any(value.is_floating_point() for key, value in inputs.items() if key != "attention_mask")
    if frozen == "before":
        _freeze_embeddings(model)
    small = rewrite.optimize(model, spec, example_inputs=inputs)
    assert_recomputed(small, "*.[0-9]*")
    _freeze_embeddings(small)
    expected, found = run(model, inputs, 1), run(small, inputs, 1)
    assert_equal(expected, found)
    trained = {path for path, grad in expected.grads.items() if grad is not None and grad.abs().sum() > 0}
    wanted = {path for path, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(wanted) < len(expected.grads)
    assert len(trained) > 20
    assert name == "plain-branching" or {path for path in wanted - trained if "key.bias" not in path} == set()


def _freeze_embeddings(model: nn.Module) -> None:
    """All that comes before the blocks: what the first of them is given needs no gradient."""
    for module in model.modules():
        if "Embedding" in type(module).__name__:
            module.requires_grad_(False)


class Biased(nn.Module):
    """A block that is given a bias beside its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(hidden) + bias)


class SharedBias(nn.Module):
    """Blocks that share a bias computed before them."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Biased() for _ in range(4))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        bias = self.bias(hidden)
        for block in self.blocks:
            hidden = block(hidden, bias)
        return hidden.pow(2).mean()


@pytest.mark.thinned(2)
@specs
def test_what_is_frozen_after_the_rewrite_is_frozen_in_the_recompute_too(spec: str) -> None:
    """huggingface/transformers#23170: the recompute meets a kind of call that the forward did not."""
    model, inputs = SharedBias(), {"hidden": torch.randn(3, 8)}
    small = rewrite.optimize(model, spec, example_inputs=inputs)
    assert_recomputed(small, "blocks.0", "blocks.3")
    model.bias.requires_grad_(False)
    for _ in range(2):
        assert_equal(run(model, inputs), run(small, inputs))
