"""What passes do to the modules of a model before it is captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from rewrite.contract import Pass, Preparation


def prepare(root: nn.Module, passes: Sequence[Pass]) -> Mapping[str, Preparation]:
    """Have each pass prepare `root`, in order; what each did, by its spec text.

    When one raises, what those before it did is undone.
    """
    done: dict[str, Preparation] = {}
    try:
        for each in passes:
            done.setdefault(str(each), each.prepare(root))
    except BaseException:
        undo(done)
        raise
    return done


def settled(done: Mapping[str, Preparation]) -> Mapping[str, Preparation]:
    """The same for good: what was replaced is held no longer, so its memory can go."""
    return {spec: replace(preparation, undo=Preparation.undo) for spec, preparation in done.items()}


def undo(done: Mapping[str, Preparation]) -> None:
    """Have the model as it was, the last change first."""
    for preparation in reversed(list(done.values())):
        preparation.undo()
