"""Reports of frozen parts that thawed, and of trained parts beside them that got no gradient."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import rewrite
from passes import Checkpoint, DetachFrozen
from tests.cases.recomputed import assert_recomputed
from tests.passes.frozen import batch, bert
from tests.zoo.compare import assert_equal, run


class Encoder(nn.Module):
    """A frozen encoder with a batch norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.head = nn.Linear(4, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(images).mean((2, 3))).pow(2).mean()


@pytest.mark.parametrize("passes", [[], [Checkpoint(select="encoder")]])
def test_a_frozen_batch_norm_does_not_thaw_at_train(passes: list[rewrite.Pass]) -> None:
    """chemprop#952, lightly-ai/lightly#1438: freeze, train(), run: the running mean is unchanged."""
    model, images = Encoder(), 2 + torch.randn(4, 3, 8, 8)
    model.encoder.requires_grad_(False)
    small = rewrite.optimize(model, [DetachFrozen(eval_mode=True), *passes], example_inputs=images)
    optimizer = torch.optim.SGD(small.head.parameters(), lr=0.1)
    norm = small.encoder[1]
    for _ in range(3):
        small.train()
        optimizer.zero_grad()
        small(images).backward()
        optimizer.step()
        assert norm.num_batches_tracked.item() == 0
        assert torch.equal(norm.running_mean, torch.zeros(4))
        assert torch.equal(norm.running_var, torch.ones(4))
    assert small.head.weight.grad.abs().sum() > 0
    assert small.training


def test_a_frozen_batch_norm_moves_once_where_it_is_not_held() -> None:
    """chemprop#952, the other way round: without eval_mode its statistics move, as in the untouched model."""
    model, images = Encoder().train(), 2 + torch.randn(4, 3, 8, 8)
    model.encoder.requires_grad_(False)
    small = rewrite.optimize(model, [DetachFrozen(), Checkpoint(select="encoder")], example_inputs=images)
    expected, found = run(model, {"images": images}), run(small, {"images": images})
    assert_equal(expected, found)
    assert found.buffers["encoder.1.num_batches_tracked"].item() == 1


@pytest.mark.parametrize(
    "order", ["detach-frozen,checkpoint", pytest.param("checkpoint,detach-frozen", marks=pytest.mark.sweep)]
)
def test_lora_trains_under_a_recompute_with_a_frozen_embedding(order: str) -> None:
    """huggingface/transformers#42489: LoRA untrained under checkpointing; every lora_B has a gradient."""
    model = bert(3, 0)
    config = LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["query", "value"])
    adapted = get_peft_model(model, config).train()
    inner = adapted.get_base_model()
    assert not any(weight.requires_grad for weight in inner.bert.embeddings.parameters())
    small = rewrite.optimize(inner, order, example_inputs=batch())
    assert_recomputed(small, "bert.encoder.layer.0", "bert.encoder.layer.2")
    found = run(small, batch())
    assert_equal(run(inner, batch()), found)
    adapters = {name: grad for name, grad in found.grads.items() if "lora_B" in name}
    assert len(adapters) == 6
    assert all(grad is not None and grad.abs().sum() > 0 for grad in adapters.values())


@pytest.mark.parametrize(
    "spec", [pytest.param("detach-frozen,checkpoint", marks=pytest.mark.sweep), "checkpoint{policy=sqrt},detach-frozen"]
)
def test_every_trained_weight_behind_frozen_embeddings_has_its_gradient(spec: str) -> None:
    """huggingface/transformers#21381, #23170: freeze the first layer, integer inputs, every trainable grad present."""
    model = bert(3, 1)
    small = rewrite.optimize(model, spec, example_inputs=batch())
    found = run(small, batch())
    assert_equal(run(model, batch()), found)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name, grad in found.grads.items() if grad is not None} == trained
    assert trained
