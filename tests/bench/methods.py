"""The methods by name: `blocks`, `blocks+ffn@4+loss@8`, `compile@0.5`, `ours:checkpoint{policy=sqrt}`."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from tests.bench.workload import Workload

PARTS: dict[str, tuple[str, str]] = {
    "transformers": ("checkpointing", "transformers_checkpointing"),
    "blocks": ("checkpointing", "block_checkpointing"),
    "sequential": ("checkpointing", "sequential_checkpointing"),
    "selective": ("checkpointing", "selective_checkpointing"),
    "ffn": ("hand_chunked", "chunked_feed_forward"),
    "config-ffn": ("hand_chunked", "config_chunked_feed_forward"),
    "loss": ("hand_chunked", "checkpointed_loss"),
    "loss-in-forward": ("hand_chunked", "loss_in_forward"),
    "compile": ("compiled", "compiled"),
    "ours": ("ours", "rewritten"),
}
"""What a method is made of: the file and the function that changes a workload, given the text behind `@`."""

EAGER = "eager"
PEERS = (
    "transformers",
    "blocks",
    "sequential",
    "selective@matmul",
    "selective@linear",
    "selective@alternate",
    "ffn@4",
    "config-ffn@64",
    "loss@8",
    "loss-in-forward@16",
    "blocks+loss@8",
    "blocks+loss-in-forward@16",
    "sequential+loss-in-forward@16",
    "blocks+ffn@4+loss@8",
    "compile@1",
    "compile@0.5",
    "compile@0.2",
    "compile@0",
)
"""Everything there is beside this project, alone and as people combine it."""

OURS = "ours:"


def parts(method: str) -> list[tuple[str, str]]:
    """(name, argument) of each part, in the order they are applied. Raises ValueError for a name that is none."""
    if method == EAGER:
        return []
    if method.startswith(OURS):
        return [("ours", method.removeprefix(OURS))]
    named = [(name, argument) for name, _, argument in (part.partition("@") for part in method.split("+"))]
    for name, _ in named:
        if name not in PARTS or name == "ours":
            known = ", ".join([EAGER, *(part for part in PARTS if part != "ours"), "ours:SPEC"])
            raise ValueError(f"no method {name!r}; there are {known}")
    return named


def changes(method: str) -> list[Callable[[Workload], None]]:
    """What makes the steps of a workload run under `method`; each raises UnavailableError where it has no place."""
    return [_change(name, argument) for name, argument in parts(method)]


def _change(name: str, argument: str) -> Callable[[Workload], None]:
    home, function = PARTS[name]
    apply = getattr(importlib.import_module(f"tests.bench.{home}"), function)
    return lambda workload: apply(workload, argument)
