"""The benchmark: `python -m tests.bench peers`, `python -m tests.bench untouched`; `--help` tells the rest.

peers      memory and time of a training step, for models by methods
untouched  what a captured graph without passes costs over eager, on short steps
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rewrite import RewriteError
from tests.bench.frontier import check_picture, draw
from tests.bench.methods import EAGER, OURS, PEERS
from tests.bench.models import MODELS, TINY, UNTOUCHED
from tests.bench.results import Row, document
from tests.bench.run import Settings, run
from tests.bench.table import EXPLAINED, reasons, table

PIPE_WIDTH = 240
"""Columns where no terminal says how many it has: enough for every table."""


def parser() -> argparse.ArgumentParser:
    """What the command line understands."""
    made = argparse.ArgumentParser("python -m tests.bench", description="Memory and time of training steps.")
    commands = made.add_subparsers(dest="command", required=True)
    peers = commands.add_parser("peers", help="models by methods")
    peers.add_argument("--models", "--model", nargs="+", choices=[*MODELS, *UNTOUCHED, *TINY], default=list(MODELS))
    peers.add_argument(
        "--methods",
        nargs="+",
        default=["peers"],
        help=f"`peers` for all of {', '.join(PEERS)}; parts join with +; ours:SPEC, ours:budget=16MiB, "
        "ours:budget=6.3x (a peak above parameters that much smaller than eager's)",
    )
    untouched = commands.add_parser("untouched", help="a captured graph without passes beside eager")
    untouched.set_defaults(models=list(UNTOUCHED), methods=[OURS])
    for command in (peers, untouched):
        command.add_argument("--reps", type=int, default=10, help="pairs of timed steps, 0 for no times")
        command.add_argument("--timeout", type=float, default=900, help="seconds a process may take")
        command.add_argument("--json", type=Path, help="write every figure here")
        command.add_argument("--png", type=Path, help="draw peak against time here")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    chosen = parser().parse_args(arguments)
    try:
        if chosen.png:
            check_picture()
        rows = measured(chosen)
    except RewriteError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if chosen.json:
        chosen.json.write_text(json.dumps(finite(document(rows, chosen.reps)), indent=2, allow_nan=False) + "\n")
    if chosen.png:
        draw(rows, chosen.png)
    return 0


def measured(chosen: argparse.Namespace) -> list[Row]:
    """Every row; the table of each model is printed when it is complete."""
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    methods = [part for method in chosen.methods for part in (PEERS if method == "peers" else [method])]
    settings = Settings(chosen.reps, chosen.timeout)
    rows: list[Row] = []
    for model in chosen.models:
        mine = list(run([model], [EAGER, *methods], settings, _tell))
        console.print(table(model, mine))
        for line in reasons(mine):
            console.print(f"  {line}", style="dim", markup=False, highlight=False, soft_wrap=True)
        console.print()
        rows += mine
    console.print(EXPLAINED, style="dim", markup=False, highlight=False)
    return rows


def _tell(model: str, method: str) -> None:
    print(f"{model}: {method}", file=sys.stderr)


def finite(value: Any) -> Any:
    """`value` with None for numbers that JSON has no way to write."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main())
