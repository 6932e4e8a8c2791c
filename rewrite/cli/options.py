"""Options that several commands share. Each can be given as an environment variable: `--batch` as REWRITE_BATCH."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rewrite.cli.narration import Narration
from rewrite.cli.output import Output
from rewrite.cli.tasks import TASK_NAMES
from rewrite.errors import InputError
from rewrite.optim.kinds import OPTIMIZERS

DEVICES = ("cpu", "cuda")
PROFILES = ("h100", "a100", "rtx4090", "rtx3090", "l4", "a10", "t4", "cpu")

Command = Callable[..., Any]


def option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    """A click option with its environment variable."""
    long = next(name for name in names if name.startswith("--"))
    variable = "REWRITE_" + long.removeprefix("--").replace("-", "_").upper()
    return click.option(*names, envvar=variable, **settings)


def model_options(command: Command) -> Command:
    """MODEL and the batch of its training step."""
    for decorate in reversed(
        (
            click.argument("model"),
            option("--task", type=click.Choice(TASK_NAMES), metavar="TASK", help="Training task: causal-lm, ..."),
            option("--batch", type=int, metavar="N", help="Batch size (default 1)."),
            option("--seq", type=int, metavar="N", help="Tokens, or audio samples (default 512, or what fits)."),
            option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override one configuration value."),
        )
    ):
        command = decorate(command)
    return command


def step_options(command: Command) -> Command:
    """What the step's memory is estimated for."""
    for decorate in reversed(
        (
            option("--optimizer", type=click.Choice(OPTIMIZERS), default="none", help="Count its state."),
            option("--device", type=click.Choice(DEVICES), default="cpu", help="Whose kernels to plan for."),
        )
    ):
        command = decorate(command)
    return command


NUMERICS = ("exact", "reassociated", "reduced")
allow_option = option(
    "--allow", type=click.Choice(NUMERICS), default="reassociated", help="Loosest numerics of a chosen pass."
)
profile_option = option(
    "--device-profile", "profile", type=click.Choice(PROFILES), help="Peak rates that price the time."
)
max_peak_option = option("--max-peak", metavar="SIZE", help="Exit 1 when the peak is over SIZE, as 8GiB.")


def passes_option(*, required: bool) -> Callable[[Command], Command]:
    """The pipeline's spec text, as `spec`."""
    presence: dict[str, Any] = {"callback": _some_passes} if required else {"default": ""}
    return option(
        "-p",
        "--passes",
        "spec",
        metavar="SPEC",
        help="Passes to apply, or plan.json: checkpoint{policy=sqrt},...",
        **presence,
    )


def _some_passes(context: click.Context, parameter: click.Parameter, spec: str | None) -> str:
    if spec is None:
        raise InputError("-p", "no passes are given", "name some, as -p checkpoint; `rewrite passes` lists them")
    return spec


def output_options(command: Command) -> Command:
    """How and where the result is written; gives the command `output` and `narration`."""

    @functools.wraps(command)
    @click.pass_obj
    def prepared(
        narration: Narration | None,
        /,
        *args: Any,
        as_json: bool,
        output_path: Path | None,
        force: bool,
        quiet: bool,
        verbose: bool,
        color: str,
        **rest: Any,
    ) -> Any:
        narration = narration or Narration()
        narration.quiet, narration.verbose = quiet, verbose
        output = Output(output_path, color, as_json, force)
        output.check()
        return command(*args, output=output, narration=narration, **rest)

    decorated: Command = prepared
    for decorate in reversed(
        (
            option("--json", "as_json", is_flag=True, help="A JSON document instead of text."),
            option(
                "-o", "--output", "output_path", type=click.Path(path_type=Path), metavar="FILE", help="Write FILE."
            ),
            option("--force", is_flag=True, help="Let -o replace a file."),
            option("-q", "--quiet", is_flag=True, help="Nothing but the result and errors."),
            option("-v", "--verbose", is_flag=True, help="Timings, warnings and tracebacks too."),
            option("--color", type=click.Choice(("auto", "always", "never")), default="auto", help="Colour the text."),
        )
    ):
        decorated = decorate(decorated)
    return decorated
