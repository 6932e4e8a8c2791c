"""The forward that stands in a rewritten module: which code serves a call, and when it steps aside."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import rewrite
from passes import Checkpoint
from rewrite.emit import rewriting
from tests.capture.models import Block, Stack, hidden


def variants(model: nn.Module) -> int:
    return sum(vars(module)["forward"].count() for module in model.modules() if "forward" in vars(module))


def small_stack(kind: type[nn.Module] = Block) -> nn.Module:
    return rewrite.optimize(Stack(2, kind), passes=[Checkpoint()], example_inputs=(hidden(),))


def loss(model: nn.Module, value: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    return model(value)


def test_other_kinds_of_calls_get_code_of_their_own() -> None:
    small, plain = small_stack(), Stack(2)
    before = variants(small)
    assert torch.equal(loss(small, hidden(4, 6)), loss(plain, hidden(4, 6)))
    assert variants(small) == before
    for module in (small, plain):
        module.eval()
    assert torch.equal(loss(small, hidden()), loss(plain, hidden()))
    assert variants(small) > before


def test_past_the_bound_the_original_forward_runs_and_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "MAX_VARIANTS", 2)
    said: list[str] = []
    monkeypatch.setattr(rewriting.log, "warning", lambda text, *values: said.append(text % values))

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, value: torch.Tensor, rate: float) -> torch.Tensor:
            return self.linear(value) * rate

    model = Scaled()
    small = rewrite.optimize(model, example_inputs=(hidden(), 0.0))
    for rate in range(1, 6):
        assert torch.equal(small(hidden(), rate / 2), model(hidden(), rate / 2))
    assert vars(small)["forward"].count() == 2
    assert said == ["region 'root': 2 kinds of calls have code; further kinds run the original forward"]


class Apart(nn.Module):
    """Takes by position what a keyword may be called too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor, /, **others: torch.Tensor) -> torch.Tensor:
        return self.linear(value).sum() + sum(each.square().sum() for each in others.values())


def test_a_keyword_may_be_called_as_what_is_given_by_position() -> None:
    model = Apart()
    small = rewrite.optimize(model, example_inputs=(hidden(),))
    assert torch.equal(small(hidden(), value=hidden() * 2), model(hidden(), value=hidden() * 2))
    assert vars(small)["forward"].count() == 2


class Remembering(nn.Module):
    """Puts what it computes into a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: torch.Tensor, cache: Any) -> torch.Tensor:
        keys, _ = cache.update(self.linear(value)[:, None], value[:, None], 0)
        return keys.sum((1, 2))


def test_a_step_of_generation_runs_the_original_forward() -> None:
    model = Remembering()
    small = rewrite.optimize(model, example_inputs=(hidden(), DynamicCache()))
    before = vars(small)["forward"].count()
    mine, theirs = DynamicCache(), DynamicCache()
    with torch.no_grad():
        for seed in (1, 2, 3):
            assert torch.equal(small(hidden(seed=seed), mine), model(hidden(seed=seed), theirs))
    assert vars(small)["forward"].count() <= before + 1
    assert mine.get_seq_length() == theirs.get_seq_length() == 15


def test_a_copy_has_code_and_weights_of_its_own() -> None:
    small = small_stack()
    copied = copy.deepcopy(small)
    assert variants(copied) == variants(small)
    with torch.no_grad():
        copied.first.weight.zero_()
    assert torch.equal(loss(small, hidden()), loss(Stack(2), hidden()))
    assert not torch.equal(loss(copied, hidden()), loss(small, hidden()))
    for module in copied.modules():
        if "forward" in vars(module):
            assert vars(module)["forward"].module is module
            assert vars(module)["forward"].rewriting.root is copied


@pytest.mark.parametrize("way", ["pickle", "save"])
def test_a_pickled_model_captures_again(way: str) -> None:
    small = small_stack()
    if way == "pickle":
        loaded = pickle.loads(pickle.dumps(small))
    else:
        file = io.BytesIO()
        torch.save(small, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert variants(loaded) == 0
    assert torch.equal(loss(loaded, hidden()), loss(small, hidden()))
    assert variants(loaded) > 0


def test_a_replica_runs_with_its_own_tensors() -> None:
    small = small_stack()
    replica = small._replicate_for_data_parallel()
    assert vars(replica)["forward"].module is replica
    assert vars(small)["forward"].module is small
    replica._parameters, replica._modules = {}, dict(small._modules)
    changed = replica._modules["first"] = copy.deepcopy(small.first)
    with torch.no_grad():
        changed.weight.zero_()
        changed.bias.zero_()
    for module in (replica, small):
        module.eval()
    assert not torch.equal(loss(replica, hidden()), loss(small, hidden()))


def test_the_forward_looks_like_the_original() -> None:
    small = small_stack()
    assert inspect.signature(small.forward) == inspect.signature(Stack(2).forward)
    assert small.forward.__doc__ == Stack.forward.__doc__


def test_remove_takes_the_rewrite_off() -> None:
    small = small_stack()
    rewrite.remove(small)
    assert not any("forward" in vars(module) for module in small.modules())
    assert torch.equal(loss(small, hidden()), loss(Stack(2), hidden()))
    with pytest.raises(rewrite.ModelError, match=r"it was not made by rewrite\.optimize"):
        rewrite.report(small)


def test_a_forward_somebody_put_on_the_instance_is_kept() -> None:
    model = Stack(2)
    original = model.forward
    model.forward = lambda value: 3 * original(value)  # type: ignore[method-assign]
    small = rewrite.optimize(model, example_inputs=(hidden(),))
    assert torch.equal(loss(small, hidden()), loss(model, hidden()))
    given = model.forward
    rewrite.remove(small)
    assert vars(small)["forward"] is not None
    assert model.forward is given


def test_a_failed_in_place_rewrite_leaves_the_model_as_it_was() -> None:
    model = Stack(2)
    with pytest.raises(rewrite.CaptureError):
        rewrite.optimize(model, example_inputs=(torch.ones(3, 5),), inplace=True)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_trace_is_refused_and_follows_once_the_rewrite_is_off() -> None:
    model = Stack(2)
    small = rewrite.optimize(model, passes=[Checkpoint()], example_inputs=(hidden(),)).eval()
    with pytest.raises(
        rewrite.ModelError, match=r"torch.jit.trace cannot look into generated code\nNext: call rewrite.r"
    ):
        torch.jit.trace(small, (hidden(),))
    rewrite.remove(small)
    assert torch.equal(torch.jit.trace(small, (hidden(),))(hidden(3)), model.eval()(hidden(3)))


def test_a_scripted_model_is_refused() -> None:
    scripted = torch.jit.script(nn.Linear(4, 4))
    for call in (lambda: rewrite.optimize(scripted), lambda: rewrite.capture(scripted, (hidden(),))):
        with pytest.raises(rewrite.ModelError, match="pass the module that it was made from"):
            call()
