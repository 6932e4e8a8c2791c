"""Copies, pickles, files, dtypes and devices."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.promises.pairs import Pair, blocks, names, pair, policies
from tests.zoo import ZOO
from tests.zoo.compare import assert_equal, run

models = names("bert", "plain-branching", sweep=("llama", "plain-resnet", "t5"))


def _saved(module: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": _saved,
    "twice": lambda module: copy.deepcopy(copy.deepcopy(module)),
}


@pytest.mark.thinned(9)
@pytest.mark.parametrize("way", COPIES)
@models
def test_a_copy_computes_the_same_with_weights_of_its_own(name: str, way: str) -> None:
    both = pair(name, fresh=True)
    made = COPIES[way](both.small)
    assert not {id(p) for p in made.parameters()} & {id(p) for p in both.small.parameters()}
    assert_equal(run(both.plain, both.inputs), run(made, both.inputs))
    with torch.no_grad():
        for own, plain in zip(made.parameters(), both.plain.parameters(), strict=True):
            own.mul_(0.9)
            plain.mul_(0.9)
    assert_equal(run(both.plain, both.inputs), run(made, both.inputs))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_still_recomputes(way: str) -> None:
    both = pair("bert")
    assert _held(COPIES[way](both.small), both) == _held(both.small, both) < _held(both.plain, both)


def _held(model: nn.Module, both: Pair) -> int:
    """How many tensors autograd packs in a forward."""
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**both.inputs)
    return sum(packed)


def test_ties_survive_a_copy() -> None:
    made = copy.deepcopy(pair("gpt2").small)
    assert made.lm_head.weight is made.transformer.wte.weight
    loaded = pickle.loads(pickle.dumps(made))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


@pytest.mark.thinned(2)
@models
def test_a_state_dict_goes_both_ways(name: str) -> None:
    both = pair(name)
    other = ZOO[name].build(seed=7)
    both.small.load_state_dict(other.state_dict())
    assert_equal(run(other, both.inputs), run(both.small, both.inputs))
    other = ZOO[name].build(seed=8)
    other.load_state_dict(both.small.state_dict())
    assert_equal(run(other, both.inputs), run(both.small, both.inputs))


@pytest.mark.thinned(6)
@policies
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_dtype(dtype: torch.dtype, policy: str) -> None:
    for name in ("bert", "plain-resnet"):
        both = pair(name, policy)
        inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in both.inputs.items()}
        both.plain.to(dtype)
        both.small.to(dtype)
        assert all(parameter.dtype is dtype for parameter in both.small.parameters())
        assert_equal(run(both.plain, inputs), run(both.small, inputs))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@policies
def test_another_device(policy: str) -> None:
    both = pair("bert", policy)
    inputs = {key: value.cuda() for key, value in both.inputs.items()}
    both.plain.cuda()
    both.small.cuda()
    assert_equal(run(both.plain, inputs), run(both.small, inputs))


def test_a_copy_to_meta_and_back_is_a_module_like_any_other() -> None:
    both = pair("bert")
    made = copy.deepcopy(both.small).to("meta")
    assert all(parameter.is_meta for parameter in made.parameters())
    made = made.to_empty(device="cpu")
    made.load_state_dict(both.plain.state_dict())
    for name, buffer in both.plain.named_buffers():
        dict(made.named_buffers())[name].copy_(buffer)
    assert_equal(run(both.plain, both.inputs), run(made, both.inputs))


def test_a_pretrained_folder_round_trips(tmp_path: Path) -> None:
    for name in ("bert", "llama"):
        both = pair(name)
        folder = tmp_path / name
        both.small.save_pretrained(folder)
        loaded = type(both.plain).from_pretrained(folder).train()
        assert list(loaded.state_dict()) == list(both.plain.state_dict())
        assert_equal(run(both.plain, both.inputs), run(loaded, both.inputs))


def test_a_module_or_parameter_replaced_later_is_used() -> None:
    both = pair("plain-branching")
    for module in (both.plain, both.small):
        torch.manual_seed(4)
        module.head.weight = nn.Parameter(torch.randn(3, 32))
        blocks(module)[0].up = nn.Linear(32, 64, bias=False)
        blocks(module)[1].down.weight = nn.Parameter(torch.randn(32, 64))
    assert_equal(run(both.plain, both.inputs), run(both.small, both.inputs))
