"""`rewrite plan MODEL --budget SIZE`"""

from __future__ import annotations

from dataclasses import replace

import click

from rewrite.cli.narration import Narration
from rewrite.cli.options import (
    allow_option,
    model_options,
    option,
    output_options,
    passes_option,
    profile_option,
    step_options,
)
from rewrite.cli.output import Output
from rewrite.report.documents import plan_document
from rewrite.report.plan import plan_lines
from rewrite.report.sizes import parse_bytes


@click.command(name="plan")
@model_options
@option("--budget", metavar="SIZE", required=True, help="Bytes that a training step may take, as 8GiB.")
@passes_option(required=False)
@allow_option
@step_options
@profile_option
@output_options
def command(
    model: str,
    task: str | None,
    batch: int | None,
    seq: int | None,
    settings: tuple[str, ...],
    budget: str,
    spec: str,
    allow: str,
    optimizer: str,
    device: str,
    profile: str | None,
    output: Output,
    narration: Narration,
) -> None:
    """Choose the passes with which a training step of MODEL fits --budget in the least predicted time.

    Prints them as a spec, ready to paste into -p or optimize(); -o plan.json saves them too. Passes given with -p run
    first. Exit 1 when no choice fits, with the lowest peak there is.
    """
    parse_bytes(budget)
    from rewrite.cli.loading import Request
    from rewrite.cli.running import loaded, parsed_passes, plan_of

    passes = parsed_passes(spec, narration)
    subject = loaded(Request(model, task, batch, seq, settings), narration)
    found = plan_of(
        subject, budget, passes, optimizer=optimizer, device=device, profile=profile, allow=allow, narration=narration
    )
    if output.wants_json:
        output.document(plan_document(found))
        if output.path is not None:
            replace(output, path=None).lines(plan_lines(found, output.width))
    else:
        output.lines(plan_lines(found, output.width))
