"""How much memory this machine has left, and whether a check on real tensors fits it."""

from __future__ import annotations

import os
from pathlib import Path

from rewrite.errors import ModelError
from rewrite.report.sizes import size_text

CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Bytes that can still be allocated: the machine's, or this process group's limit when that is less."""
    found = [count for count in (_machine_bytes(), group_bytes()) if count is not None]
    return min(found, default=None)


def _machine_bytes() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return _physical_bytes()
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _physical_bytes()


def _physical_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def group_bytes() -> int | None:
    """What the control group leaves, where there is a limit."""
    try:
        limit = (CONTROL_GROUP / "memory.max").read_text().strip()
        used = int((CONTROL_GROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if not limit.isdigit() else max(0, int(limit) - used)


def refuse_beyond_memory(subject: str, needed_bytes: int) -> None:
    """Raise `ModelError` when `needed_bytes` do not fit what is left of this machine's memory."""
    left = available_bytes()
    if left is None or needed_bytes <= left:
        return
    raise ModelError(
        subject,
        f"a step on real tensors takes {size_text(needed_bytes)}, and {size_text(left)} are free here",
        "make it smaller: --set num_hidden_layers=2, --batch 1, a shorter --seq",
    )
