"""What holds for every test: one thread, no network, no colour, laws that give the same examples on every run."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for one another on a busy core take ten times as long
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("NO_COLOR", "1")
os.environ.pop("FORCE_COLOR", None)

settings.register_profile("steady", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("steady")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the variants of a test marked `thinned(n)` every n-th runs by default; the others are a sweep's."""
    seen = Counter[str]()
    for item in items:
        mark = item.get_closest_marker("thinned")
        if mark is None:
            continue
        function = item.nodeid.partition("[")[0]
        if seen[function] % mark.args[0]:
            item.add_marker("sweep")
        seen[function] += 1
