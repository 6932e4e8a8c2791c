"""An optimizer takes what trains, in two groups, and keeps each moment in the width it should."""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle

import bitsandbytes as bnb
import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint
from rewrite.errors import InputError, OptimizerError, SelectorError
from rewrite.optim.kinds import KINDS
from tests.optim.models import batch, bert, moments_bits, train

BLOCKWISE = sorted(kind.name for kind in KINDS.values() if kind.library == "bitsandbytes")


def names(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.param_groups]


def test_what_trains_is_in_two_groups_in_the_order_of_the_model() -> None:
    model = bert()
    model.bert.encoder.layer[0].requires_grad_(False)
    optimizer = rewrite.optimizer(model, "adamw", lr=1e-3)

    decay, rest = names(optimizer)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert sorted(decay + rest) == sorted(trained)
    assert decay == [name for name in trained if name.endswith("weight") and "LayerNorm" not in name]
    assert rest == [name for name in trained if name not in decay]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert isinstance(optimizer, torch.optim.AdamW)


def test_a_matrix_of_a_norm_does_not_decay() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm((3, 4), bias=False))

    assert names(rewrite.optimizer(model, "adamw", lr=1e-3)) == [["0.weight"], ["1.weight"]]


def test_tied_parameters_are_there_once() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight

    assert names(rewrite.optimizer(model, "sgd", lr=0.1)) == [["0.weight"]]


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_kind_trains(name: str) -> None:
    model = bert(dropout=0.0)
    optimizer = rewrite.optimizer(model, name, lr=0.1 if "sgd" in name else 1e-3)
    losses = []
    for _ in range(12):
        loss = model(**batch(size=16)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    assert losses[-1] < 0.9 * losses[0]
    assert all(group["kind"] == name for group in optimizer.param_groups)


def test_adamw_is_torchs_adamw_bit_for_bit() -> None:
    model, other = bert(), bert()
    decay = [p for n, p in other.named_parameters() if p.ndim > 1 and "LayerNorm" not in n]
    rest = [p for n, p in other.named_parameters() if p.ndim == 1 or "LayerNorm" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.9))
    ours = rewrite.optimizer(model, "adamw", lr=1e-3, weight_decay=0.1, betas=(0.8, 0.9))

    assert train(model, ours, range(4)) == train(other, theirs, range(4))


def test_8_bit_moments_are_in_8_bits_but_for_embeddings_and_small_ones() -> None:
    model = bert()
    optimizer = rewrite.optimizer(model, "adamw8bit", lr=1e-3, keep_fp32=["bert.encoder.layer.1.output.dense"])
    train(model, optimizer, range(1))

    expected = {
        name: 32 if "embeddings" in name or "layer.1.output.dense" in name or parameter.numel() < 4096 else 8
        for name, parameter in model.named_parameters()
    }
    assert moments_bits(optimizer) == expected
    assert set(expected.values()) == {8, 32}


def test_embeddings_in_8_bits() -> None:
    model = bert()
    optimizer = rewrite.optimizer(model, "adam8bit", lr=1e-3, embedding_bits=8)
    train(model, optimizer, range(1))

    assert moments_bits(optimizer)["bert.embeddings.word_embeddings.weight"] == 8


def test_a_head_tied_to_an_embedding_is_the_embedding() -> None:
    model = nn.Sequential(nn.Linear(64, 200, bias=False), nn.Embedding(200, 64))
    model[0].weight = model[1].weight
    optimizer = rewrite.optimizer(model, "lion8bit", lr=1e-3)
    model[0](torch.ones(2, 64)).sum().backward()
    optimizer.step()

    assert moments_bits(optimizer) == {"0.weight": 32}


def test_overrides_for_another_model_do_not_reach_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id that was overridden may be the id of a later model's parameter."""
    manager = bnb.optim.GlobalOptimManager.get_instance()
    model = nn.Linear(64, 200)
    stale = {"optim_bits": 32, "lr": 1e9}
    monkeypatch.setattr(manager, "pid2config", {id(parameter): stale for parameter in model.parameters()})
    monkeypatch.setattr(manager, "index2config", {(0, 0): stale, (1, 0): stale})
    optimizer = rewrite.optimizer(model, "adamw8bit", lr=1e-3)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()

    assert moments_bits(optimizer) == {"weight": 8, "bias": 32}
    assert float(model.weight.detach().abs().max()) < 1.0


@pytest.mark.parametrize("name", BLOCKWISE)
def test_a_step_moves_the_version_of_a_parameter(name: str) -> None:
    model = nn.Linear(64, 100)
    optimizer = rewrite.optimizer(model, name, lr=1e-3)
    model(torch.ones(2, 64)).sum().backward()
    versions = [parameter._version for parameter in model.parameters()]
    optimizer.step()

    assert all(parameter._version > version for parameter, version in zip(model.parameters(), versions, strict=True))


def test_a_step_between_forward_and_backward_is_noticed_by_the_recompute() -> None:
    model = bert()
    small = rewrite.optimize(model, passes=[Checkpoint()], example_inputs=batch())
    optimizer = rewrite.optimizer(small, "adamw8bit", lr=1e-3)
    train(small, optimizer, range(1))
    loss, other = small(**batch()).loss, small(**batch(2)).loss
    other.backward()
    optimizer.step()

    with pytest.raises(RuntimeError, match=r"modified|changed"):
        loss.backward()


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "sgd8bit"])
def test_copied_and_pickled_optimizers_step_on(name: str) -> None:
    model = bert()
    optimizer = rewrite.optimizer(model, name, lr=1e-3)
    train(model, optimizer, range(2))
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    expected = train(model, optimizer, range(2, 5))

    for other, its in copies:
        assert moments_bits(its) == moments_bits(optimizer) if "sgd" not in name else True
        assert train(other, its, range(2, 5)) == expected


def test_a_copy_made_before_the_first_step_keeps_its_widths() -> None:
    model = bert()
    optimizer = rewrite.optimizer(model, "adamw8bit", lr=1e-3)
    other, its = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(1))
    train(other, its, range(1))

    assert moments_bits(its) == moments_bits(optimizer)


def test_a_scheduler_takes_it() -> None:
    model = bert()
    optimizer = rewrite.optimizer(model, "adamw8bit", lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 2)
    for step in range(2):
        train(model, optimizer, range(step, step + 1))
        scheduler.step()

    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([5e-4, 5e-4])


def test_state_goes_through_a_safe_load() -> None:
    model = bert()
    optimizer = rewrite.optimizer(model, "adamw8bit", lr=1e-3)
    train(model, optimizer, range(1))
    stored = io.BytesIO()
    torch.save(optimizer.state_dict(), stored)
    stored.seek(0)
    optimizer.load_state_dict(torch.load(stored, weights_only=True))
    codes = {entry["qmap1"].data_ptr() for entry in optimizer.state.values() if "qmap1" in entry}

    assert len(codes) == 1


def test_unknown_names_and_options_are_told() -> None:
    model = bert()
    with pytest.raises(InputError, match=r"optimizer 'adamw4bit': it is not known\nNext: choose one of: adamw, adamw8"):
        rewrite.optimizer(model, "adamw4bit", lr=1e-3)
    with pytest.raises(InputError, match=r"it has no option 'betas'\nNext: its options are lr, .*, momentum$"):
        rewrite.optimizer(model, "sgd", lr=1e-3, betas=(0.9, 0.99))
    with pytest.raises(InputError, match="embedding_bits: it is 4\nNext: give 8 or 32"):
        rewrite.optimizer(model, "adamw8bit", lr=1e-3, embedding_bits=4)
    with pytest.raises(InputError, match=r"weight_decay is 0\.1, and bitsandbytes decays.*\nNext: take adamw8bit"):
        rewrite.optimizer(model, "adam8bit", lr=1e-3, weight_decay=0.1)
    with pytest.raises(SelectorError, match=r"keep_fp32 'head': it matches no parameter of the model\nNext: name"):
        rewrite.optimizer(model, "adamw8bit", lr=1e-3, keep_fp32=["head"])


def test_a_frozen_model_is_refused() -> None:
    model = bert().requires_grad_(False)
    with pytest.raises(InputError, match=r"no parameter of the model requires a gradient\nNext: unfreeze"):
        rewrite.optimizer(model, "adamw", lr=1e-3)


def test_sharded_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class DTensor(nn.Parameter):
        pass

    model = nn.Linear(4, 4)
    model.weight = DTensor(torch.zeros(4, 4))
    with pytest.raises(OptimizerError, match=r"weight is sharded \(DTensor\).*\nNext: take adamw or adam"):
        rewrite.optimizer(model, "adamw8bit", lr=1e-3)
    assert rewrite.optimizer(model, "adamw", lr=1e-3)


def test_without_bitsandbytes_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    model = nn.Linear(2, 2)
    assert rewrite.optimizer(model, "adamw", lr=1e-3)
    expected = r"'lion': it is that of bitsandbytes, which is not installed\nNext: install it: pip install 'rewrite"
    with pytest.raises(OptimizerError, match=expected):
        rewrite.optimizer(model, "lion", lr=1e-3)
