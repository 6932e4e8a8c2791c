"""`rewrite passes [NAME]`"""

from __future__ import annotations

from dataclasses import replace

import click

from rewrite import registry, spec
from rewrite.cli.narration import Narration
from rewrite.cli.options import output_options
from rewrite.cli.output import Output
from rewrite.errors import SpecError
from rewrite.registry import Description
from rewrite.report.documents import passes_document
from rewrite.report.passes import list_lines, pass_lines


@click.command(name="passes")
@click.argument("name", required=False)
@output_options
def command(name: str | None, output: Output, narration: Narration) -> None:
    """List the passes there are, or describe the one called NAME: its options, and how close it keeps the numbers.

    NAME{option=value} also says what the options come to.
    """
    described = [_described(each) for each in ([name] if name else registry.names())]
    if output.wants_json:
        output.document(passes_document(described))
        return
    if not described:
        narration.note("No pass is installed.")
    output.lines(pass_lines(described[0], output.width) if name else list_lines(described, output.width))
    if not name and described:
        narration.note("rewrite passes NAME describes one; rewrite diff MODEL -p NAME shows what it changes.")


def _described(text: str) -> Description:
    """A pass by its name, or by its name and options."""
    if "{" not in text:
        return registry.describe(text)
    given = spec.parse(text, registry.load)
    if len(given) != 1:
        raise SpecError(f"passes {text}", f"it names {len(given)} passes", "name one pass")
    return replace(registry.describe(given[0].name), settings=given[0].settings())
