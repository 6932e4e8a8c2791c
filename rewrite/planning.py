"""The public functions that plan: which passes a budget takes, and how large a batch fits a memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rewrite import pipeline, spec
from rewrite.api import checked_passes, estimate, optimize
from rewrite.contract import Pass, loosest
from rewrite.emit.preparing import prepare
from rewrite.emit.rewriting import Rewriting
from rewrite.emit.tree import copy_tree
from rewrite.errors import InputError
from rewrite.example import Example
from rewrite.plan.choose import chooser
from rewrite.plan.document import Plan, is_plan_file
from rewrite.plan.fingerprint import fingerprint
from rewrite.plan.fit import Fit, fit_sizes
from rewrite.plan.joint import Joint
from rewrite.plan.largest import MOST, largest
from rewrite.plan.search import profile_for
from rewrite.program import Program
from rewrite.report.sizes import parse_bytes


def plan(
    model: nn.Module,
    budget: str | int,
    example_inputs: Any,
    *,
    passes: str | Pass | Sequence[Pass] = (),
    optimizer: str | None = None,
    device: str | None = None,
    profile: str | None = None,
    allow: str = "reassociated",
    name: str = "",
    progress: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Plan:
    """What `optimize(model, budget=budget)` would choose, with what it takes and what else there is to have.

    Nothing is allocated, `model` may be on the meta device and is left as it was; the arguments are those of
    `optimize`. Raises what `optimize` raises, BudgetError when no choice fits.
    """
    if isinstance(passes, str) and is_plan_file(passes):
        raise InputError("passes", f"{passes} is a plan to a budget already", "give passes that are to run before")
    given = checked_passes(model, passes)
    choose = chooser(budget, given, profile=profile, allow=allow)
    with progress("capturing"):
        captured = _captured(model, example_inputs, optimizer, device, given)
    with progress("planning"):
        joint = choose.joint(pipeline.run(captured, given).program)
        found = joint.plan(budget)
        frontier, floor = joint.frontier(), joint.floor()
    chosen = (*given, *found.passes)
    return Plan(
        model=name or type(model).__name__,
        passes=chosen,
        spec=spec.render(chosen),
        numerics=loosest(chosen),
        budget_bytes=budget if isinstance(budget, int) else parse_bytes(budget),
        profile=profile or profile_for(joint.base.device),
        fingerprint=fingerprint(captured, captured.metadata["example"]),
        before=found.before,
        after=found.after,
        chosen=found.priced,
        kept=found.keep.kept,
        frontier=frontier,
        floor=floor,
    )


def fit(
    model: nn.Module,
    make_inputs: Callable[[int], Any],
    memory: str | int,
    *,
    optimizer: str | None = None,
    device: str | None = None,
    profile: str | None = None,
    allow: str = "reassociated",
    step: int = 1,
    most: int = MOST,
) -> Fit:
    """The largest batch, or sequence, whose training step fits `memory` bytes: with no passes, and with the best plan.

    `make_inputs` gives the example inputs of a size, a multiple of `step` up to `most`; a larger size must not need
    less memory. The other arguments are those of `optimize`. Steps are run on fakes: nothing is allocated but the
    inputs. Raises what `optimize` and `make_inputs` raise.
    """
    given = checked_passes(model, ())
    choose = chooser(memory, given, profile=profile, allow=allow)

    def joint_at(size: int, only: int | None) -> Joint:
        return choose.joint(_captured(model, make_inputs(size), optimizer, device), only)

    return fit_sizes(joint_at, memory, step=step, most=most)


def find_batch(
    model: nn.Module,
    make_inputs: Callable[[int], Any],
    memory: str | int,
    *,
    passes: str | Pass | Sequence[Pass] = (),
    optimizer: str | None = None,
    device: str | None = None,
    most: int = MOST,
) -> int:
    """The largest batch whose training step, with `passes`, fits `memory` bytes; 0 when not even one does.

    For loops that try a batch and fail: `make_inputs(n)` gives the example inputs of batch n, and nothing is allocated
    but these. Raises what `optimize`, `estimate` and `make_inputs` raise, InputError for a memory that is no size.
    """
    memory_bytes = memory if isinstance(memory, int) else parse_bytes(memory)

    def peak_bytes(batch: int) -> int:
        inputs = make_inputs(batch)
        module = model
        if passes:
            module = optimize(model, passes, example_inputs=inputs, optimizer=optimizer, device=device)
        return estimate(module, inputs, optimizer=optimizer, device=device).peak_bytes

    return largest(peak_bytes, memory_bytes, most=most)


def _captured(
    model: nn.Module, example_inputs: Any, optimizer: str | None, device: str | None, given: Sequence[Pass] = ()
) -> Program:
    """The program of one call, with what a plan is made from; `given` passes prepare the model."""
    rewriting = Rewriting(copy_tree(model), (), {})
    args, kwargs = rewriting.call(example_inputs)
    rewriting.prepared = prepare(rewriting.root, given)
    with torch.enable_grad():
        program = rewriting.program("", rewriting.capture("", args, kwargs))
    example = Example(rewriting.root, args, kwargs, optimizer, device)
    return replace(program, metadata={**program.metadata, "example": example})
