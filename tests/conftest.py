"""What holds for every test: no network, no colour, laws that give the same examples on every run."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("NO_COLOR", "1")
os.environ.pop("FORCE_COLOR", None)

settings.register_profile("steady", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("steady")
