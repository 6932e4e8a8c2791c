"""The command line. `main` is its entry point; it maps every ending to an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

import click

from rewrite.cli.group import rewrite_command
from rewrite.cli.narration import Narration
from rewrite.errors import RewriteError

DONE, UNFIT, BAD_USE, CHECK_FAILED, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 101, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 done; 1 no plan fits, different under `--exit-code`, or over `--max-peak`; 2 bad usage, or the model could not be
    captured; 3 a check failed; 101 a fault of this program; 130 interrupted.
    """
    narration = Narration()
    try:
        given = None if arguments is None else list(arguments)
        code = rewrite_command.main(args=given, prog_name="rewrite", standalone_mode=False, obj=narration)
        sys.stdout.flush()
        return code if isinstance(code, int) else DONE
    except (BrokenPipeError, SystemExit) as end:  # click makes SystemExit(1) of a reader that has gone
        if isinstance(end, SystemExit) and end.code != 1:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # keeps the interpreter's last flush quiet
        return DONE
    except (KeyboardInterrupt, click.Abort):
        narration.error("interrupted")
        return INTERRUPTED
    except click.ClickException as error:
        narration.usage(error)
        return BAD_USE
    except RewriteError as error:
        narration.fault(error)
        return error.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            narration.internal(error)
            return INTERNAL
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        narration.error(
            f"error: output: it could not be written: {error.strerror}\nNext: free some space, or write elsewhere"
        )
        return BAD_USE
    except Exception as error:  # noqa: BLE001  whatever else is a fault of ours, told in one screen
        narration.internal(error)
        return INTERNAL
