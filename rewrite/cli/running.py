"""What the commands have in common once their options are read: load, capture, estimate, compare."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence

import torch

from rewrite import registry, spec
from rewrite.api import Report, estimate, optimize, report
from rewrite.certificate import Certificate
from rewrite.cli.loading import Loaded, Request, load
from rewrite.cli.memory import refuse_beyond_memory
from rewrite.cli.narration import Narration
from rewrite.contract import Numerics, Pass
from rewrite.diff.compare import compare, view
from rewrite.diff.model import GraphDiff, View
from rewrite.emit.rewriting import Rewriting
from rewrite.emit.tree import copy_tree
from rewrite.errors import CaptureError, ModelError
from rewrite.program import Program
from rewrite.verify import verify


def parsed_passes(text: str, narration: Narration) -> tuple[Pass, ...]:
    """The passes of a spec; raises `SpecError`, `PassError`."""
    hush(narration)
    return spec.parse(text, registry.load)


def hush(narration: Narration) -> None:
    """Keep what libraries say about themselves off the terminal, unless the user asked for it."""
    if narration.verbose:
        return
    warnings.simplefilter("ignore")
    for name in ("torch", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")  # read when transformers is imported
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.set_verbosity(logging.CRITICAL)


def loaded(request: Request, narration: Narration, device: str = "meta") -> Loaded:
    """The model and its batch, and the choices made for the user told."""
    hush(narration)
    with narration.working(f"building {request.model}"):
        subject = load(request, torch.device(device))
    narration.note(subject.description)
    for note in subject.notes:
        narration.note(note)
    return subject


def diff_of(
    subject: Loaded,
    passes: Sequence[Pass],
    *,
    optimizer: str,
    device: str,
    profile: str | None,
    narration: Narration,
) -> GraphDiff:
    """Capture once, rewrite, run a step of both on fake tensors, and compare."""
    inputs = subject.example_inputs
    with narration.working(f"capturing and rewriting {subject.name}"):
        rewritten = optimize(subject.model, passes=passes, example_inputs=inputs)
    told = report(rewritten)
    programs = _programs(subject, told)
    untouched = _emitted(subject.model, programs[0])
    with narration.working("running a step before"):
        before = estimate(untouched, inputs, optimizer=optimizer, device=device)
    with narration.working("running a step after"):
        after = estimate(rewritten, inputs, optimizer=optimizer, device=device)
    name = f"{subject.name}  {subject.description}"
    priced = profile or ("cpu" if device == "cpu" else "h100")
    return compare(name, *programs, before, after, told.steps, profile=priced)


def _emitted(model: torch.nn.Module, program: Program) -> torch.nn.Module:
    """A copy of `model` that runs `program`, captured from it, without capturing it once more."""
    rewriting = Rewriting(copy_tree(model), (), {})
    rewriting.emit(program)
    return rewriting.root


def view_of(subject: Loaded, *, optimizer: str, device: str, narration: Narration) -> View:
    """Capture, and run a step on fake tensors."""
    with narration.working(f"capturing {subject.name}"):
        untouched = optimize(subject.model, passes=[], example_inputs=subject.example_inputs)
    with narration.working("running a step"):
        step = estimate(untouched, subject.example_inputs, optimizer=optimizer, device=device)
    _, program = _programs(subject, report(untouched))
    return view(f"{subject.name}  {subject.description}", program, step)


def _programs(subject: Loaded, told: Report) -> tuple[Program, Program]:
    if told.before is None or told.after is None:
        raise CaptureError(subject.name, "its root forward left no graph", "run again with -v and report it")
    return told.before, told.after


def certificate_of(request: Request, passes: Sequence[Pass], narration: Narration) -> Certificate:
    """Build the model twice: without storage to see that a step fits here, then with random weights to run it."""
    planned = loaded(request, narration)
    if _has_no_numbers(planned.model):
        with narration.working("estimating a step"):
            step = estimate(planned.model, planned.example_inputs)
        # the step itself, the first model's gradients kept beside it, and the two results that are compared
        refuse_beyond_memory(request.model, step.peak_bytes + 2 * parameter_bytes(planned.model))
        planned = load(request, torch.device("cpu"))
    if _has_no_numbers(planned.model):
        cause = "its parameters are on the meta device and hold no numbers"
        raise ModelError(request.model, cause, "build it on the CPU to verify it")
    with narration.working("rewriting"):
        rewritten = optimize(planned.model, passes=passes, example_inputs=planned.example_inputs)
    with narration.working("running both"):
        return verify(planned.model, rewritten, planned.example_inputs, numerics=loosest(passes))


def _has_no_numbers(model: torch.nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of every parameter, shared ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def loosest(passes: Sequence[Pass]) -> Numerics:
    """The numerics a pipeline promises: those of its least exact pass."""
    order = list(Numerics)
    return max((each.numerics for each in passes), key=order.index, default=Numerics.EXACT)
