"""`rewrite fit MODEL --memory SIZE`"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from rewrite.cli.lengths import lengths_text, longest, read_lengths
from rewrite.cli.narration import Narration
from rewrite.cli.options import allow_option, model_options, option, output_options, profile_option, step_options
from rewrite.cli.output import Output
from rewrite.errors import InputError
from rewrite.report.documents import fit_document
from rewrite.report.fit import FitRow, FitTable, fit_lines
from rewrite.report.sizes import parse_bytes


@click.command(name="fit")
@model_options
@option("--memory", metavar="SIZE", required=True, help="Bytes there are for a training step, as 24GiB.")
@option("--lengths", type=click.Path(path_type=Path), metavar="FILE", help="A dataset's sequence lengths, as text.")
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
    memory: str,
    lengths: Path | None,
    allow: str,
    optimizer: str,
    device: str,
    profile: str | None,
    output: Output,
    narration: Narration,
) -> None:
    """Find the largest batch whose training step fits --memory, with no passes and with the best plan.

    With --batch, the largest sequence for it, a multiple of eight. With --lengths, the largest batch for the longest
    sequence of the dataset, of 95% and of 50% of it. Nothing is allocated.
    """
    memory_bytes = parse_bytes(memory)
    if batch is not None and (seq is not None or lengths is not None):
        cause = "with the batch and the sequence given there is nothing left to find"
        raise InputError("--batch", cause, "leave out --batch, for the largest; or --seq and --lengths")
    if seq is not None and lengths is not None:
        raise InputError("--seq", "the sequences are those of --lengths", "leave one of the two out")
    given = None if lengths is None else read_lengths(lengths)
    from rewrite.cli.loading import Request
    from rewrite.cli.running import fit_of, loaded

    request = Request(model, task, batch, seq, settings)
    asked = [(request, "")]
    if given is not None:
        asked = [(replace(request, seq=each), f" ({100 * share:.0f}%)") for share, each in longest(given)]
    rows, subject = [], None
    for each, note in asked:
        subject = loaded(each, narration)
        label, found = fit_of(
            subject, each, memory, optimizer=optimizer, device=device, profile=profile, allow=allow, narration=narration
        )
        rows.append(FitRow(label + note, found))
    assert subject is not None
    table = FitTable(
        f"{subject.name}  {type(subject.model).__name__}",
        "batch" if batch is None else "sequence",
        memory_bytes,
        device,
        optimizer,
        tuple(rows),
        lengths_text(lengths, given) if lengths is not None and given is not None else "",
    )
    if output.wants_json:
        output.document(fit_document(table))
    else:
        output.lines(fit_lines(table, output.width))
