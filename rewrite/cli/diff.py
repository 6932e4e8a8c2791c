"""`rewrite diff MODEL -p SPEC`"""

from __future__ import annotations

import click
from rich.text import Text

from rewrite.cli.narration import Narration
from rewrite.cli.options import (
    max_peak_option,
    model_options,
    option,
    output_options,
    passes_option,
    profile_option,
    step_options,
)
from rewrite.cli.output import Output
from rewrite.report.diff import changed_paths, diff_lines, stat_view
from rewrite.report.documents import diff_document
from rewrite.report.sizes import parse_bytes, size_text


@click.command(name="diff")
@model_options
@passes_option(required=True)
@step_options
@profile_option
@option("--stat", is_flag=True, help="One line a hunk, and the figures.")
@option("--name-only", is_flag=True, help="Only the module paths that change.")
@option("--full", is_flag=True, help="Every line, small ones and unchanged ones too.")
@option("--exit-code", is_flag=True, help="Exit 1 when anything changes.")
@max_peak_option
@output_options
def command(
    model: str,
    task: str | None,
    batch: int | None,
    seq: int | None,
    settings: tuple[str, ...],
    spec: str,
    optimizer: str,
    device: str,
    profile: str | None,
    stat: bool,
    name_only: bool,
    full: bool,
    exit_code: bool,
    max_peak: str | None,
    output: Output,
    narration: Narration,
) -> int:
    """Show what passes would change in MODEL, with the bytes each change saves. Nothing is changed or written."""
    limit_bytes = None if max_peak is None else parse_bytes(max_peak)
    from rewrite.cli.loading import Request
    from rewrite.cli.running import diff_of, loaded, parsed_passes

    passes = parsed_passes(spec, narration)
    subject = loaded(Request(model, task, batch, seq, settings), narration)
    found = diff_of(subject, passes, optimizer=optimizer, device=device, profile=profile, narration=narration)
    if output.wants_json:
        output.document(diff_document(found))
    elif name_only:
        output.lines(Text(path) for path in changed_paths(found))
    elif stat:
        output.lines(stat_view(found, output.width))
    else:
        output.lines(diff_lines(found, output.width, full=full))
    if limit_bytes is not None and found.after.peak_bytes > limit_bytes:
        narration.error(f"over --max-peak: {size_text(found.after.peak_bytes)} > {size_text(limit_bytes)}")
        return 1
    return int(exit_code and found.modified)
