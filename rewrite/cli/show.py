"""`rewrite show MODEL`"""

from __future__ import annotations

import click

from rewrite.cli.narration import Narration
from rewrite.cli.options import max_peak_option, model_options, output_options, step_options
from rewrite.cli.output import Output
from rewrite.report.documents import view_document
from rewrite.report.show import show_lines
from rewrite.report.sizes import parse_bytes, size_text


@click.command(name="show")
@model_options
@step_options
@max_peak_option
@output_options
def command(
    model: str,
    task: str | None,
    batch: int | None,
    seq: int | None,
    settings: tuple[str, ...],
    optimizer: str,
    device: str,
    max_peak: str | None,
    output: Output,
    narration: Narration,
) -> int:
    """Show the graph of MODEL, layers folded, with what each node keeps for the backward and where the peak is."""
    limit_bytes = None if max_peak is None else parse_bytes(max_peak)
    from rewrite.cli.loading import Request
    from rewrite.cli.running import loaded, view_of

    subject = loaded(Request(model, task, batch, seq, settings), narration)
    view = view_of(subject, optimizer=optimizer, device=device, narration=narration)
    if output.wants_json:
        output.document(view_document(view))
    else:
        output.lines(show_lines(view, output.width))
    if limit_bytes is not None and view.estimate.peak_bytes > limit_bytes:
        narration.error(f"over --max-peak: {size_text(view.estimate.peak_bytes)} > {size_text(limit_bytes)}")
        return 1
    return 0
