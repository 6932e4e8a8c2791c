"""`rewrite passes [NAME]`"""

from __future__ import annotations

import click

from rewrite import registry
from rewrite.cli.narration import Narration
from rewrite.cli.options import output_options
from rewrite.cli.output import Output
from rewrite.report.documents import passes_document
from rewrite.report.passes import list_lines, pass_lines


@click.command(name="passes")
@click.argument("name", required=False)
@output_options
def command(name: str | None, output: Output, narration: Narration) -> None:
    """List the passes there are, or describe the one called NAME: its options, and how close it keeps the numbers."""
    described = [registry.describe(each) for each in ([name] if name else registry.names())]
    if output.wants_json:
        output.document(passes_document(described))
        return
    if not described:
        narration.note("No pass is installed.")
    output.lines(pass_lines(described[0], output.width) if name else list_lines(described, output.width))
    if not name and described:
        narration.note("rewrite passes NAME describes one; rewrite diff MODEL -p NAME shows what it changes.")
