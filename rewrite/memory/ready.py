"""Have a rewritten model's code for a training step ready before the step is run on fakes, where none can be made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rewrite.emit.forward import RegionForward
from rewrite.inputs import as_call
from rewrite.memory.fakes import Attributes, same_random_state
from rewrite.memory.modes import in_mode


def make_ready(module: nn.Module, example_inputs: Any, *, train: bool) -> None:
    """Capture this kind of call, if `module` is rewritten, or wraps a model that is, and has no code for it yet.

    As the first real call would. A wrapper (peft's) is run up to the call of the model in it; torch's own (DDP,
    FSDP), which talk to other processes on the way, are not.
    """
    args, kwargs = as_call(example_inputs)
    forward = vars(module).get("forward")
    with in_mode(module, train), torch.set_grad_enabled(train):
        if isinstance(forward, RegionForward):
            forward.prepare(args, kwargs)
        elif not type(module).__module__.startswith("torch."):
            _ready_within(module, args, kwargs)


@contextlib.contextmanager
def misses_told(module: nn.Module) -> Iterator[list[str]]:
    """Fills a list with a sentence for each rewritten part that the block runs, on fakes, without code of its own."""
    forwards = [vars(inner).get("forward") for inner in module.modules()]
    found = {id(each.rewriting): each.rewriting for each in forwards if isinstance(each, RegionForward)}
    for rewriting in found.values():
        rewriting.without_code.clear()
    told: list[str] = []
    yield told
    paths = dict.fromkeys(path for rewriting in found.values() for path in rewriting.without_code)
    told += [
        f"{path or 'the model itself'}: counted as its own forward runs, for there is no code for it" for path in paths
    ]


def _ready_within(wrapper: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    found = (inner for inner in wrapper.modules() if isinstance(vars(inner).get("forward"), RegionForward))
    model = next(found, None)
    if model is None:
        return
    forward: RegionForward = vars(model)["forward"]

    def prepare(*args: Any, **kwargs: Any) -> None:
        vars(model)["forward"] = forward  # code is made for a module as it is
        forward.prepare(args, kwargs)
        raise _ReadyError

    inside = set(model.modules())
    around = [(module, Attributes(module)) for module in wrapper.modules() if module not in inside]
    vars(model)["forward"] = prepare
    try:
        # what else it raises, as on meta tensors, the run on fakes raises too, or need not
        with same_random_state(), contextlib.suppress(Exception):
            wrapper(*args, **kwargs)
    finally:
        vars(model)["forward"] = forward
        for module, attributes in around:
            attributes.restore(module)


class _ReadyError(Exception):
    """The model in the wrapper has been called."""
