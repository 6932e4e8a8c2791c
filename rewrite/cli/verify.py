"""`rewrite verify MODEL -p SPEC`"""

from __future__ import annotations

import click

from rewrite.cli.narration import Narration
from rewrite.cli.options import model_options, option, output_options, passes_option
from rewrite.cli.output import Output
from rewrite.report.certificate import certificate_lines
from rewrite.report.documents import certificate_document


@click.command(name="verify")
@model_options
@passes_option(required=False)
@option("--full", is_flag=True, help="Every value that was compared.")
@output_options
def command(
    model: str,
    task: str | None,
    batch: int | None,
    seq: int | None,
    settings: tuple[str, ...],
    spec: str,
    full: bool,
    output: Output,
    narration: Narration,
) -> int:
    """Run MODEL and its rewrite on real tensors and compare loss, outputs, every gradient, buffers and random state.

    An architecture gets random weights. Without -p the captured graph is compared as it is. Exit 3 when they differ.
    """
    from rewrite.cli.loading import Request
    from rewrite.cli.running import certificate_of, parsed_passes

    passes = parsed_passes(spec, narration)
    certificate = certificate_of(Request(model, task, batch, seq, settings), passes, narration)
    if output.wants_json:
        output.document(certificate_document(certificate, model, spec))
    else:
        output.lines(certificate_lines(certificate, model, spec, output.width, full=full))
    return 0 if certificate.passed else 3
