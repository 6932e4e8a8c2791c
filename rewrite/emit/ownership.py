"""A model whose precision a pass has set computes in it, whatever autocast the caller has on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from rewrite import weight_casts

_here = threading.local()
"""The rewritten models whose code runs, by thread."""


@contextlib.contextmanager
def owning(rewriting: object) -> Iterator[bool]:
    """Run code of `rewriting` without the caller's autocast; gives whether this is its outermost call."""
    held: list[object] = _here.__dict__.setdefault("held", [])
    if any(each is rewriting for each in held):
        yield False
        return
    weight_casts.next_round()
    held.append(rewriting)
    try:
        with contextlib.ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield True
    finally:
        held.remove(rewriting)
