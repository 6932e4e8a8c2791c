"""One training step, run under the tracker."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from rewrite import weight_casts
from rewrite.capture.answers import SHADOW_ELEMENTS, Answers
from rewrite.errors import InputError
from rewrite.inputs import as_call
from rewrite.memory.autograd import lone_holders
from rewrite.memory.devices import device_assumptions, kernels_of
from rewrite.memory.fakes import Clones, FakeTensors, same_random_state, swapped
from rewrite.memory.loss import pick_loss
from rewrite.memory.modes import in_mode
from rewrite.memory.optimizer import StepOptimizer, build_optimizer
from rewrite.memory.place import ModulePaths, Place, Places
from rewrite.memory.questions import Questions
from rewrite.memory.quick import QuickFakes
from rewrite.memory.ready import misses_told
from rewrite.memory.tracker import Event, Storage, Tracker
from rewrite.memory.work import Tally

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Run:
    """What a step left behind: every birth and death, the work done, and how it was run."""

    events: tuple[Event, ...]
    saved: tuple[Storage, ...]
    """Made in the forward and alive when it ended, the loss and the inputs excluded."""
    tally: Tally
    calls: Mapping[str, int]
    loss: str
    assumptions: tuple[str, ...]


def check_device(device: str | None) -> None:
    """Raise InputError unless it is None, or one that a step can be counted for."""
    if device is not None and device not in DEVICES:
        choices = " or ".join(DEVICES)
        raise InputError(f"device {device!r}", f"memory can be planned for {choices}", f"give one of them: {choices}")


def run_step(
    module: nn.Module, example_inputs: Any, *, optimizer: str | None, device: str, train: bool, real: bool
) -> Run:
    """Run forward, backward and optimizer step of `module` on stand-ins for its tensors; it stays as it was.

    The gradients start as None, as after `zero_grad()`; of the output only the loss is held, as in
    `model(**batch).loss.backward()`. Raises InputError for inputs that do not fit, and whatever the forward raises.
    """
    check_device(device)
    lone_holders()  # found once, outside the modes
    modules = ModulePaths(module)
    mode = None if real else FakeTensorMode(allow_non_fake_inputs=True)
    quick = None if mode is None else QuickFakes(mode)
    convert = Clones() if quick is None else FakeTensors(quick)
    with contextlib.ExitStack() as around:
        around.enter_context(same_random_state())
        around.enter_context(_uncollected())
        around.enter_context(_looks_real())
        around.enter_context(in_mode(module, train))
        around.enter_context(mode or contextlib.nullcontext())
        around.enter_context(swapped(module, convert))
        args, kwargs = inputs_as_call(example_inputs, convert)
        answers = None if real else Answers(_small_originals(convert))
        questions = Questions(answers, modules, quick)
        tally = Tally()
        tracker = Tracker(Places(modules), questions, tally, cpu_kernels=device == "cpu")
        with tracker:
            stepper = build_optimizer(optimizer, module, device) if train else None
        tracker.restart()
        _hold(tracker, module, (args, kwargs), stepper)
        _watch_gradients(tracker, module)
        tally.restart()
        with tracker, kernels_of("cpu" if real else device), modules.watching():
            missed = around.enter_context(misses_told(module))
            saved, loss, events = _run(tracker, module, args, kwargs, stepper, train)
    assumptions = (*device_assumptions(module, device), *questions.assumptions, *missed)
    return Run(events, saved, tally, dict(modules.calls), loss, assumptions)


def _run(
    tracker: Tracker,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stepper: StepOptimizer | None,
    train: bool,
) -> tuple[tuple[Storage, ...], str, tuple[Event, ...]]:
    tracker.phase = "forward"
    if not train:
        with torch.no_grad():
            output = module(*args, **kwargs)
        events = tuple(tracker.events)
        del output
        return (), "none: the forward alone was run", events
    loss, meaning = pick_loss(module(*args, **kwargs))
    held = tracker.owner(loss)
    for copy in weight_casts.copies():
        tracker.set_category(copy, "parameter")
    saved = tuple(storage for storage in tracker.alive() if storage.category == "temporary" and storage is not held)
    for storage in saved:
        storage.category = "saved"
    tracker.phase = "backward"
    loss.backward()
    if stepper is not None:
        tracker.phase = "optimizer"
        stepper.step()
    return saved, meaning, tuple(_without_idle_state(tracker, module, stepper))


def _without_idle_state(tracker: Tracker, module: nn.Module, stepper: StepOptimizer | None) -> Iterator[Event]:
    """The events but for the state of parameters that got no gradient: an optimizer makes none for them."""
    idle = [] if stepper is None else [parameter for parameter in module.parameters() if parameter.grad is None]
    absent = {tracker.owner(state) for parameter in idle if stepper for state in stepper.state_of(parameter)}
    yield from (event for event in tracker.events if event[0] not in absent)


def inputs_as_call(
    example_inputs: Any, convert: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as a call, with each tensor converted. Raises InputError for what is no call."""

    def leaf(value: Any) -> Any:
        return convert(value) if isinstance(value, torch.Tensor) else value

    args, kwargs = torch.utils._pytree.tree_map(leaf, as_call(example_inputs))
    return args, kwargs


def _hold(tracker: Tracker, module: nn.Module, inputs: Any, stepper: StepOptimizer | None) -> None:
    for owner, held in module.named_modules():
        place = Place(owner, "", "")
        for parameter in held.parameters(recurse=False):
            tracker.hold(parameter, "parameter", place)
        for buffer in held.buffers(recurse=False):
            tracker.hold(buffer, "buffer", place)
        for attribute in torch.utils._pytree.tree_leaves(list(held.__dict__.values())):
            if isinstance(attribute, torch.Tensor):
                tracker.hold(attribute, "buffer", place)
    for value in torch.utils._pytree.tree_leaves(inputs):
        if isinstance(value, torch.Tensor):
            tracker.hold(value, "input")
    for state in stepper.state_tensors() if stepper is not None else ():
        tracker.hold(state, "optimizer")


def _watch_gradients(tracker: Tracker, module: nn.Module) -> None:
    """Have each parameter's gradient called one when it is there. The hooks die with the stand-ins."""
    for path, owner in module.named_modules():
        for parameter in owner.parameters(recurse=False):
            if not parameter.requires_grad:
                continue

            def accumulated(parameter: torch.Tensor, path: str = path) -> None:
                if parameter.grad is not None:
                    tracker.set_category(parameter.grad, "gradient", path)

            parameter.register_post_accumulate_grad_hook(accumulated)


def _small_originals(convert: FakeTensors | Clones) -> dict[int, torch.Tensor]:
    return {
        id(fake): original
        for original, fake in convert.pairs()
        if original.numel() <= SHADOW_ELEMENTS and not isinstance(original, nn.Parameter)
    }


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection within the block, so that deaths come when the last reference goes, on every run."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _looks_real() -> Iterator[None]:
    """Have transformers take the path of a real run: it asks whether a tensor is fake, to leave out checks of data."""
    utils = sys.modules.get("transformers.utils.import_utils")
    if utils is None or not hasattr(utils, "is_fake_tensor"):
        yield
        return
    original = utils.is_fake_tensor
    setattr(utils, "is_fake_tensor", lambda _: False)  # noqa: B010 - a module of another package has no such member
    try:
        yield
    finally:
        setattr(utils, "is_fake_tensor", original)  # noqa: B010
