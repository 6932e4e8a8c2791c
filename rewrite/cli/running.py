"""What the commands have in common once their options are read: load, capture, estimate, compare."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rewrite import registry, spec
from rewrite.api import diff, estimate, optimize, report
from rewrite.bisect import Bisection, bisect
from rewrite.certificate import Certificate
from rewrite.cli.loading import Loaded, Request, inputs_again, load
from rewrite.cli.memory import refuse_beyond_memory
from rewrite.cli.narration import Narration
from rewrite.contract import Pass
from rewrite.diff.compare import view
from rewrite.diff.model import GraphDiff, View
from rewrite.errors import CaptureError, ModelError
from rewrite.plan.document import Plan, is_plan_file, load_plan
from rewrite.plan.fit import Fit
from rewrite.plan.largest import MOST
from rewrite.planning import fit, plan
from rewrite.ranges import Ranges, ranges
from rewrite.verify import verify


def parsed_passes(text: str, narration: Narration) -> str | tuple[Pass, ...]:
    """The passes of a spec, or the name of a plan file; raises `SpecError`, `PassError`, `PlanError`."""
    hush(narration)
    if is_plan_file(text):
        load_plan(text)  # told before the model is built
        return text
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
    passes: str | Sequence[Pass],
    *,
    optimizer: str,
    device: str,
    profile: str | None,
    narration: Narration,
) -> GraphDiff:
    """Capture once, rewrite, run a step of both on fake tensors, and compare."""
    return diff(
        subject.model,
        passes,
        subject.example_inputs,
        optimizer=optimizer,
        device=device,
        profile=profile,
        name=f"{subject.name}  {subject.description}",
        progress=lambda stage: narration.working(f"{stage} {subject.name}"),
    )


def plan_of(
    subject: Loaded,
    budget: str,
    passes: str | Sequence[Pass],
    *,
    optimizer: str,
    device: str,
    profile: str | None,
    allow: str,
    narration: Narration,
) -> Plan:
    """Capture, and choose passes on fake tensors."""
    return plan(
        subject.model,
        budget,
        subject.example_inputs,
        passes=passes,
        optimizer=optimizer,
        device=device,
        profile=profile,
        allow=allow,
        name=f"{subject.name}  {subject.description}",
        progress=lambda stage: narration.working(f"{stage} {subject.name}"),
    )


SEQUENCE_STEP = 8
"""Sequences are tried in multiples of eight, which kernels are made for."""


def fit_of(
    subject: Loaded,
    request: Request,
    memory: str,
    *,
    optimizer: str,
    device: str,
    profile: str | None,
    allow: str,
    narration: Narration,
) -> tuple[str, Fit]:
    """The largest batch, or, for a given batch, the largest sequence, and what it was found for."""
    sequences = request.batch is not None
    step, most = (SEQUENCE_STEP, _most_tokens(subject)) if sequences else (1, MOST)

    def make_inputs(size: int) -> Any:
        return inputs_again(subject, replace(request, seq=size) if sequences else replace(request, batch=size))

    with narration.working(f"fitting {subject.name}"):
        found = fit(
            subject.model, make_inputs, memory,
            optimizer=optimizer, device=device, profile=profile, allow=allow, step=step, most=most,
        )  # fmt: skip
    if sequences:
        return f"batch {request.batch}", found
    length = request.seq or subject.seq
    return (f"sequence {length}" if length else "its inputs"), found


def _most_tokens(subject: Loaded) -> int:
    from rewrite.cli.inputs import position_limit

    return position_limit(subject.model) or MOST


def view_of(subject: Loaded, *, optimizer: str, device: str, narration: Narration) -> View:
    """Capture, and run a step on fake tensors."""
    with narration.working(f"capturing {subject.name}"):
        untouched = optimize(subject.model, passes=[], example_inputs=subject.example_inputs)
    with narration.working("running a step"):
        step = estimate(untouched, subject.example_inputs, optimizer=optimizer, device=device)
    program = report(untouched).after
    if program is None:
        raise CaptureError(subject.name, "its root forward left no graph", "run again with -v and report it")
    return view(f"{subject.name}  {subject.description}", program, step)


def certificate_of(request: Request, passes: str | Sequence[Pass], narration: Narration) -> Certificate:
    """Run a step of the model, and of its rewrite, on real tensors."""
    subject = with_numbers(request, narration)
    with narration.working("rewriting"):
        rewritten = optimize(subject.model, passes=passes, example_inputs=subject.example_inputs)
    with narration.working("running both"):
        return verify(subject.model, rewritten, subject.example_inputs)


def bisection_of(
    subject: Loaded, passes: str | Sequence[Pass], tolerance: float | None, max_trials: int | None, narration: Narration
) -> tuple[Bisection, Ranges | None]:
    """The operators to keep in fp32, and the values near overflow; None for passes that compute in fp32."""
    with narration.working("running rewrites"):
        found = bisect(subject.model, passes, subject.example_inputs, tolerance=tolerance, max_trials=max_trials)
    low = next((precision.dtype for each in found.passes if (precision := each.precision()) is not None), None)
    if low is None:
        return found, None
    with narration.working("running it in fp32"):
        return found, ranges(subject.model, subject.example_inputs, low)


def with_numbers(request: Request, narration: Narration) -> Loaded:
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
        raise ModelError(request.model, cause, "build it on the CPU to run it")
    return planned


def _has_no_numbers(model: torch.nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of every parameter, shared ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
