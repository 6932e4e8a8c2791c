"""Reports of users about the state of optimizers in 8 bits."""

from __future__ import annotations

import copy

import bitsandbytes as bnb
import pytest
import torch

import rewrite
from passes import Checkpoint, ChunkFFN
from tests.optim.models import batch, bert, moments_bits, train

EMBEDDINGS = ("word", "position", "token_type")


def stock_moment(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.dtype:
    moment: torch.Tensor = optimizer.state[parameter]["state1"]
    return moment.dtype


def test_an_override_of_the_original_holds_for_the_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes#1269: "32-bit override ignored". The rewritten model has the parameters that were overridden."""
    manager = bnb.optim.GlobalOptimManager.get_instance()
    for table in ("pid2config", "index2config"):
        monkeypatch.setattr(manager, table, {})
    model = bert()
    word = model.bert.embeddings.word_embeddings.weight
    manager.override_config(word, "optim_bits", 32)
    small = rewrite.optimize(model, passes=[Checkpoint()], example_inputs=batch())
    stock = bnb.optim.Adam8bit(small.parameters(), lr=1e-3)
    train(small, stock, range(1))

    assert stock_moment(stock, word) == torch.float32
    assert stock_moment(stock, small.bert.encoder.layer[0].output.dense.weight) == torch.uint8


@pytest.mark.thinned(4)
@pytest.mark.parametrize("copied", [False, True], ids=["as it is", "deepcopy"])
@pytest.mark.parametrize("passes", [[], [Checkpoint()], [ChunkFFN(chunks=2), Checkpoint()]], ids=str)
def test_embeddings_keep_32_bits_through_rewrites_and_copies(passes: list[rewrite.Pass], copied: bool) -> None:
    """bitsandbytes#1269, after deepcopy too: in stock bitsandbytes the copy's parameters have other ids."""
    small = rewrite.optimize(bert(), passes=passes, example_inputs=batch())
    small = copy.deepcopy(small) if copied else small
    optimizer = rewrite.optimizer(small, "adam8bit", lr=1e-3)
    train(small, optimizer, range(1))
    bits = moments_bits(optimizer)

    assert [bits[f"bert.embeddings.{name}_embeddings.weight"] for name in EMBEDDINGS] == [32, 32, 32]
    assert bits["bert.encoder.layer.1.output.dense.weight"] == 8


def test_what_one_model_keeps_in_32_bits_does_not_reach_the_next() -> None:
    """The overrides of bitsandbytes stand in a manager of the process, by id and by position."""
    manager = bnb.optim.GlobalOptimManager.get_instance()
    before = (dict(manager.pid2config), dict(manager.index2config), list(manager.module_weight_config_triple))
    first = bert()
    train(first, rewrite.optimizer(first, "adam8bit", lr=1e-3, keep_fp32=["bert", "classifier"]), range(1))
    assert (manager.pid2config, manager.index2config, manager.module_weight_config_triple) == before
    second = bert()
    optimizer = rewrite.optimizer(second, "adam8bit", lr=1e-3, embedding_bits=8)
    train(second, optimizer, range(1))

    large = {name: 8 for name, parameter in second.named_parameters() if parameter.numel() >= 4096}
    assert {name: bits for name, bits in moments_bits(optimizer).items() if name in large} == large
