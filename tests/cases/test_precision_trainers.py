"""What wraps a rewritten model in autocast (an outer span, accelerate, the Trainer) changes nothing of what it runs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import rewrite
from passes import Checkpoint, MixedPrecision

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
Inputs = dict[str, torch.Tensor]


def bert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
    return BertForMaskedLM(BertConfig(num_hidden_layers=2, **sizes))


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))


def batch() -> Inputs:
    ids = torch.randint(4, 100, (2, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def small(build: Callable[[], nn.Module], dtype: str, *, checkpoint: bool = False) -> nn.Module:
    passes = [MixedPrecision("O1", dtype=dtype), *([Checkpoint()] if checkpoint else [])]
    return rewrite.optimize(build(), passes, example_inputs=batch())


class Ops(TorchDispatchMode):
    """Every operator that runs, with the dtypes it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(made)
        self.ran.append((str(func), tuple(leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor))))
        return made

    @property
    def casts(self) -> int:
        return sum("_to_copy" in name for name, _ in self.ran)


def step(model: nn.Module, call: Any = None) -> tuple[Ops, torch.Tensor, dict[str, torch.Tensor]]:
    """A training step with the weights' copies made already: what ran, the loss, the gradients."""
    call = call or model
    gc.collect()  # copies of weights of models that are gone are looked at no more
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(5)
        with Ops() as ops:
            loss = call(**batch()).loss
            loss.backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return ops, loss.detach(), grads


def assert_same_step(expected: Any, found: Any) -> None:
    ops, loss, grads = expected
    other_ops, other_loss, other_grads = found
    assert other_ops.casts == ops.casts > 0
    assert other_ops.ran == ops.ran
    assert torch.equal(other_loss, loss)
    assert grads.keys() == other_grads.keys()
    assert all(torch.equal(other_grads[name], grads[name]) for name in grads)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("outer", HALF)
@pytest.mark.parametrize(("build", "dtype", "checkpoint"), [(bert, "fp16", True), (llama, "bf16", False)])
def test_an_outer_autocast_neither_undoes_islands_nor_casts_again(
    build: Callable[[], nn.Module], dtype: str, checkpoint: bool, outer: str
) -> None:
    model = small(build, dtype, checkpoint=checkpoint)
    expected = step(model)

    def within(**inputs: torch.Tensor) -> Any:
        with torch.autocast("cpu", HALF[outer]):
            return model(**inputs)

    assert_same_step(expected, step(model, within))
    names = [name for name, dtypes in expected[0].ran if HALF[dtype] in dtypes]
    assert any("mm" in name for name in names)
    assert not any("softmax" in name or "norm" in name for name in names)


@contextlib.contextmanager
def accelerators() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(("build", "dtype", "checkpoint"), [(bert, "fp16", True), (llama, "bf16", False)])
@pytest.mark.thinned(2)
def test_a_model_that_accelerate_prepared_runs_the_same_step(
    build: Callable[[], nn.Module], dtype: str, checkpoint: bool
) -> None:
    """Accelerate's autocast is bf16: under fp16 on a CPU it wraps nothing."""
    model = small(build, dtype, checkpoint=checkpoint)
    expected = step(model)
    with accelerators():
        prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
        assert hasattr(prepared, "_original_forward")
        assert_same_step(expected, step(model, prepared))


class Watched(TrainerCallback):
    """The gradients of the first step."""

    def __init__(self) -> None:
        self.grads: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        if not self.grads:
            named = model.named_parameters()
            self.grads = {name: each.grad.clone() for name, each in named if each.grad is not None}


class Texts(torch.utils.data.Dataset[Inputs]):
    """Eight texts."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> Inputs:
        ids = torch.randint(4, 100, (8,), generator=torch.Generator().manual_seed(place))
        return {"input_ids": ids, "labels": ids.clone()}


def trained(folder: Path, model: nn.Module, **options: Any) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """Losses of two steps, gradients of the first, and the loss of an evaluation."""
    watched = Watched()
    with accelerators():
        arguments = TrainingArguments(
            str(folder), max_steps=2, per_device_train_batch_size=2, logging_steps=1, report_to="none", use_cpu=True,
            save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, seed=3, **options,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=Texts(), eval_dataset=Texts(), callbacks=[watched])
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, watched.grads, evaluated


@pytest.mark.parametrize(("build", "checkpoint"), [(bert, True), pytest.param(llama, False, marks=pytest.mark.sweep)])
def test_the_trainers_bf16_trains_as_without(
    build: Callable[[], nn.Module], checkpoint: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, grads, evaluated = trained(tmp_path, small(build, "bf16", checkpoint=checkpoint), bf16=False)
    found, found_grads, found_evaluated = trained(tmp_path, small(build, "bf16", checkpoint=checkpoint), bf16=True)
    assert len(losses) == 2
    assert found == losses
    assert found_evaluated == evaluated
    assert all(torch.equal(found_grads[name], grads[name]) for name in grads)
    unwrapped, _, _ = trained(tmp_path, build(), bf16=False)
    assert losses != unwrapped
    assert losses == pytest.approx(unwrapped, rel=1e-2)
