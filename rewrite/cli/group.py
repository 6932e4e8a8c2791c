"""The top command: its subcommands are imported when they are asked for, so that help needs no torch."""

from __future__ import annotations

import difflib
import importlib
from importlib import metadata
from typing import Any

import click

COMMANDS = {
    "bisect": "The operators to keep in fp32 so that the outputs are near enough.",
    "diff": "What passes would change in a model, line by line, with bytes.",
    "fit": "The largest batch or sequence that fits a memory.",
    "passes": "The passes there are, their options and what they promise.",
    "plan": "The passes that fit a training step into a byte budget.",
    "show": "A model's graph with the bytes each node keeps.",
    "verify": "Whether a rewritten model computes what the original does.",
}
"""Each in a module of its name, as a command called `command`."""


class LazyGroup(click.Group):
    """A group that imports a subcommand when it runs, and lists it without."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"rewrite.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"There are {', '.join(COMMANDS)}."
            raise click.UsageError(f"No such command {args[0]!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _show_version(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> Any:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"rewrite {_version()}")
        ctx.exit()


def _version() -> str:
    try:
        return metadata.version("rewrite-torch")
    except metadata.PackageNotFoundError:
        return "(not installed)"


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""MODEL is a transformers architecture (bert, gpt2, llama: its default configuration, on the meta device,
offline), a directory or hub id with a config.json, package.module:factory, or file.py:factory.

\b
Exit codes: 0 done; 1 no plan fits, different under --exit-code, or over --max-peak;
2 bad usage or capture failed; 3 check failed; 101 internal; 130 interrupted.""",
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="Print the version."
)
def rewrite_command() -> None:
    """Rewrite PyTorch models so that a training step needs less memory, and see what that changes."""
