"""`rewrite bisect MODEL -p SPEC`"""

from __future__ import annotations

import click

from rewrite.cli.narration import Narration
from rewrite.cli.options import model_options, option, output_options, passes_option
from rewrite.cli.output import Output
from rewrite.report.bisect import bisect_lines
from rewrite.report.documents import bisect_document


@click.command(name="bisect")
@model_options
@passes_option(required=True)
@option("--tolerance", "--rtol", type=float, metavar="X", help="Allowed difference over an output's largest magnitude.")
@option("--max-trials", type=int, metavar="N", help="Stop after N rewrites, with the fewest found by then.")
@option("--full", is_flag=True, help="Every value near overflow.")
@output_options
def command(
    model: str,
    task: str | None,
    batch: int | None,
    seq: int | None,
    settings: tuple[str, ...],
    spec: str,
    tolerance: float | None,
    max_trials: int | None,
    full: bool,
    output: Output,
    narration: Narration,
) -> None:
    """Find the fewest operators of MODEL to keep in fp32 so that the outputs under SPEC are finite and near enough.

    Runs MODEL and rewrites of it forward on real tensors; an architecture gets random weights. Prints the keep_fp32=
    to paste into SPEC, and the values near the largest number of its precision. Without --tolerance an output may
    differ by what rounding in each layer may come to. Exit 3 when it differs by more with every operator in fp32.
    """
    from rewrite.cli.loading import Request
    from rewrite.cli.running import bisection_of, parsed_passes, with_numbers

    passes = parsed_passes(spec, narration)
    subject = with_numbers(Request(model, task, batch, seq, settings), narration)
    found, ranges = bisection_of(subject, passes, tolerance, max_trials, narration)
    name = f"{subject.name}  {subject.description}"
    if output.wants_json:
        output.document(bisect_document(found, ranges, name))
    else:
        output.lines(bisect_lines(found, ranges, name, spec, output.width, full=full))
