"""The public functions: capture, optimize, estimate and report, each in a few lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn

from rewrite import pipeline, registry, spec
from rewrite.contract import Change, Numerics, Pass, Preparation, Refusal, loosest
from rewrite.diff.compare import compare
from rewrite.diff.model import GraphDiff
from rewrite.emit.forward import RegionForward
from rewrite.emit.held import release
from rewrite.emit.low_weights import hold_low
from rewrite.emit.ownership import owning
from rewrite.emit.preparing import prepare, settled, undo
from rewrite.emit.rewriting import Rewriting
from rewrite.emit.tree import copy_tree
from rewrite.errors import CaptureError, InputError, ModelError
from rewrite.memory import Estimate, estimate_step
from rewrite.memory.step import check_device
from rewrite.optim.kinds import check_optimizer
from rewrite.plan.choose import chooser
from rewrite.plan.document import is_plan_file, load_plan
from rewrite.program import Opaque, Program

Model = TypeVar("Model", bound=nn.Module)


def optimize(
    model: Model,
    passes: str | Pass | Sequence[Pass] = (),
    *,
    example_inputs: Any = None,
    budget: str | int | None = None,
    optimizer: str | None = None,
    device: str | None = None,
    profile: str | None = None,
    allow: str = "reassociated",
    inplace: bool = False,
    opaque: Sequence[str] = (),
) -> Model:
    """Rewrite `model` with `passes` and return an ordinary module of the same class.

    `passes` are pass objects, a spec text such as `"checkpoint{policy=sqrt}"`, or the name of a `.json` file that
    `rewrite plan -o` wrote, whose plan is refused for any other training step and is counted as it was made, whatever
    `optimizer` and `device` say. `example_inputs` is one call: a dict
    of keyword arguments, a tuple or list of positional ones, or a tensor; without them the model's `dummy_inputs` are
    used, else the first call. The result shares every Parameter and buffer with `model`, which is left as it was
    unless `inplace=True`. Modules named in `opaque` keep their own forward.

    With `budget`, bytes that a training step may take as `estimate` counts them (`"8GiB"`), passes are chosen beside
    the given ones: of what the installed passes offer, those with the least predicted time whose step fits, by the
    first training step that is captured; calls of other shapes get the same passes, and a larger one a warning. A call
    that is captured anew and fits no plan runs with the lowest peak there is, and a warning. `allow` is the loosest
    numerics a chosen pass may have: "exact", "reassociated" or "reduced". `optimizer` and `device` ("cpu", "cuda") are
    what a step is counted with, `profile` names the peak rates that price its time.

    Raises RewriteError subclasses: ModelError for a model that cannot be rewritten (no module, scripted, compiled,
    sharded, rewritten before), CaptureError when the forward fails on the example inputs, SpecError and
    SelectorError for a pipeline that does not fit, InputError for example inputs that are not a call and for
    an `optimizer` or `device` that no step is counted with, PlanError for a plan of another step, BudgetError when no
    choice fits, with the lowest peak there is and what holds it there.
    """
    check_optimizer(optimizer)
    check_device(device)
    saved = load_plan(passes) if isinstance(passes, str) and is_plan_file(passes) else None
    if saved is not None and budget is not None:
        raise InputError("budget", f"{saved.path} is a plan to a budget already", "leave one of them out")
    chosen = checked_passes(model, () if saved else passes)
    target = model if inplace else copy_tree(model)
    reasons = dict.fromkeys(_known_paths(target, opaque), "named in `opaque`")
    rewriting = Rewriting(target, chosen, reasons)
    rewriting.optimizer, rewriting.device = optimizer, device
    if saved is not None:
        rewriting.optimizer, rewriting.device = saved.optimizer, saved.device
        rewriting.choose = saved
    if budget is not None:
        rewriting.choose = chooser(budget, chosen, profile=profile, allow=allow)
    prepared = prepare(target, chosen if saved is None else saved.passes())
    rewriting.prepared = settled(prepared)
    precision = rewriting.precision
    low = precision is not None and precision.low_weights
    widen = hold_low(target, getattr(torch, precision.dtype)) if low and precision else _nothing
    try:
        rewriting.install("")
        for path in rewriting.blocks().blocks:
            rewriting.install(path)
        if example_inputs is not None:
            _rewrite(rewriting, example_inputs)
        elif getattr(model, "dummy_inputs", None) is not None:
            with contextlib.suppress(CaptureError):  # they need not fit: the first call is captured then
                _rewrite(rewriting, model.dummy_inputs)
    except BaseException:
        if inplace:
            remove(target)
            undo(prepared)
            widen()
        raise
    return cast(Model, target)


def _nothing() -> None:
    """What is to be undone where nothing was done."""


def _rewrite(rewriting: Rewriting, example_inputs: Any) -> None:
    args, kwargs = rewriting.call(example_inputs)
    own = contextlib.nullcontext() if rewriting.precision is None else owning(rewriting)
    with torch.enable_grad(), own:
        rewriting.rewrite("", *rewriting.entering(args, kwargs))


def capture(model: nn.Module, example_inputs: Any) -> Program:
    """The program of one call of `model`: nothing is computed and the model is left as it was.

    Raises ModelError for what is no module, or a scripted or compiled one; InputError for inputs that are not a call;
    CaptureError.
    """
    _check_module(model)
    rewriting = Rewriting(copy_tree(model), (), {})
    args, kwargs = rewriting.call(example_inputs)
    with torch.enable_grad():
        return rewriting.program("", rewriting.capture("", args, kwargs))


def remove(model: nn.Module) -> None:
    """Take a rewrite off again, in place: every module runs its original forward."""
    for module in model.modules():
        release(module)
        forward = vars(module).get("forward")
        if isinstance(forward, RegionForward):
            vars(module).pop("forward")
            vars(module).pop("_replicate_for_data_parallel", None)
            if forward.given is not None:
                vars(module)["forward"] = forward.given


def estimate(
    model: nn.Module, example_inputs: Any, *, optimizer: str | None = None, device: str | None = None
) -> Estimate:
    """The memory of one training step of `model`, in bytes, measured on fake tensors: nothing is allocated.

    `model` may be rewritten or not, on any device. `device` is "cpu" or "cuda"; see `Estimate` for what is counted.
    """
    return estimate_step(model, example_inputs, optimizer=optimizer, device=device)


def diff(
    model: nn.Module,
    passes: str | Pass | Sequence[Pass],
    example_inputs: Any,
    *,
    optimizer: str | None = None,
    device: str | None = None,
    profile: str | None = None,
    name: str = "",
    progress: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> GraphDiff:
    """What `passes` would change in `model`, with the bytes of a training step before and after; nothing is run.

    `model` may be on the meta device and is left as it was. `profile` names the peak rates that price the time
    (`rewrite.memory.rates.PEAK_RATES`); `progress` is entered around each stage, with its name. Raises what
    `optimize` and `estimate` raise.
    """
    with progress("capturing and rewriting"):
        rewritten = optimize(model, passes, example_inputs=example_inputs, optimizer=optimizer, device=device)
    told = report(rewritten)
    if told.before is None or told.after is None:
        raise CaptureError(
            name or type(model).__name__, "its forward left no graph", "give inputs that its forward accepts"
        )
    replaced = any(each.replaced for each in told.prepared.values())
    captured = capture(model, example_inputs) if replaced else told.before
    untouched = Rewriting(copy_tree(model), (), {})
    untouched.emit(captured)
    with progress("running a step before"):
        before = estimate(untouched.root, example_inputs, optimizer=optimizer, device=device)
    with progress("running a step after"):
        after = estimate(rewritten, example_inputs, optimizer=optimizer, device=device)
    priced = profile or ("cpu" if before.device == "cpu" else "h100")
    title = name or type(model).__name__
    return compare(title, captured, told.after, before, after, told.steps, profile=priced)


@dataclass(frozen=True)
class Report:
    """What a rewrite did to a model."""

    before: Program | None
    """As captured from the example inputs; None before the first call."""
    after: Program | None
    steps: tuple[pipeline.Step, ...]
    opaque: tuple[Opaque, ...]
    passes: tuple[Pass, ...]
    prepared: Mapping[str, Preparation] = field(default_factory=dict)
    """What each pass did to the modules before the first capture, by its spec text."""

    @property
    def numerics(self) -> Numerics:
        """The loosest of the passes' promises."""
        return loosest(self.passes)

    @property
    def changes(self) -> tuple[Change, ...]:
        return tuple(change for step in self.steps for change in step.result.changes)

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        return tuple(refusal for step in self.steps for refusal in step.result.refusals)

    def __str__(self) -> str:
        """A line for each pass, and one for each refusal and for each module that keeps its own forward."""
        lines = [
            f"{text}: {len(each.replaced)} modules replaced" for text, each in self.prepared.items() if each.replaced
        ]
        lines += [f"{step.applied}: {len(step.result.changes)} changes" for step in self.steps] or [
            "no pass has run" if self.before is not None else "nothing is captured yet: the first call is"
        ]
        lines += [f"  refused {refusal.path or '(root)'}: {refusal.reason}" for refusal in self.refusals]
        lines += [f"  as it was {each.path or '(root)'}: {each.reason}" for each in self.opaque]
        return "\n".join(lines)


def report(model: nn.Module) -> Report:
    """What each pass changed, and refused, in a model that `optimize` returned, wrapped since (DDP, peft) or not.

    Raises ModelError for another.
    """
    present = (vars(module).get("forward") for module in model.modules())
    forward = next((each for each in present if isinstance(each, RegionForward)), None)
    if forward is None:
        raise ModelError("model", "it was not made by rewrite.optimize", "call report on what optimize returned")
    rewriting = forward.rewriting
    captures = [*zip(rewriting.before, rewriting.results, strict=True)]
    # The first, unless a later one ran more passes: those of a budget are chosen for the first training step.
    before, result = max(captures, key=lambda each: len(each[1].steps), default=(None, None))
    return Report(
        before,
        result.program if result else None,
        result.steps if result else (),
        rewriting.opaque,
        rewriting.passes,
        rewriting.prepared,
    )


def checked_passes(model: nn.Module, passes: str | Pass | Sequence[Pass]) -> tuple[Pass, ...]:
    """The passes, if `model` can take them; raises ModelError, SpecError, InputError."""
    _check_module(model)
    if isinstance(passes, Pass):
        passes = (passes,)
    chosen = spec.parse(passes, registry.load) if isinstance(passes, str) else tuple(passes)
    for entry in chosen:
        if not isinstance(entry, Pass):
            text = isinstance(entry, str)
            advice = (
                f"write passes={entry!r}: a text is a whole pipeline" if text else "give pass objects or a spec text"
            )
            raise InputError("passes", f"{entry!r} is not a pass", advice)
    if isinstance(vars(model).get("forward"), RegionForward):
        raise ModelError(
            "model", "it has been optimized before", "call optimize on the original with all passes at once"
        )
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        cause = "its parameters are sharded (DTensor), so its forward cannot be captured as it is"
        raise ModelError("model", cause, "call optimize first and shard the result")
    return chosen


def _check_module(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(
            "model", f"it is no torch.nn.Module, but of type {type(model).__name__}", "pass the module itself"
        )
    if type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod"):  # without the import of dynamo
        raise ModelError(
            "model", "it is what torch.compile returned: what it runs is compiled", "pass the module it was made from"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "model", "it is scripted or traced: what it runs is compiled", "pass the module that it was made from"
        )


def _known_paths(model: nn.Module, paths: Sequence[str]) -> list[str]:
    names = {name for name, _ in model.named_modules()}
    for path in paths:
        if path not in names:
            raise InputError("opaque", f"the model has no module {path!r}", "name modules as named_modules() does")
    return list(paths)
