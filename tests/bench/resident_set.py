"""The outside check: how far the memory of the whole process rose, by the kernel's account."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")
RESET_PEAK = "5"

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Makes the C library give freed tensors back at once; a process must start with it."""


def resident_rise_bytes(run: Callable[[], object]) -> int | None:
    """Highest resident set while `run` ran, above that before it; None where the kernel keeps no such account."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before the step is not there to be used again
        RESET.write_text(RESET_PEAK)
    except (OSError, AttributeError):
        return None
    before = _status_bytes("VmRSS")
    run()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
