"""The models by name. Each builder loads what it needs and gives equal weights and batches every time."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.bench.workload import Workload


@dataclass(frozen=True)
class Entry:
    """Where a workload is built, and with which sizes."""

    home: str
    builder: str
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Workload:
        built = getattr(importlib.import_module(f"tests.bench.{self.home}"), self.builder)(**self.sizes)
        assert isinstance(built, Workload)
        return built


MODELS: dict[str, Entry] = {
    "small-gpt": Entry("small_gpt", "small_gpt"),
    "llama-like": Entry("language", "llama_like"),
    "llama-like-64k": Entry("language", "llama_like", {"length": 512, "vocabulary": 64000}),
    "bert-like": Entry("language", "bert_like"),
    "gpt2-like": Entry("language", "gpt2_like"),
    "t5-like": Entry("language", "t5_like"),
    "resnet-like": Entry("vision", "resnet_like"),
    "unet-like": Entry("vision", "unet_like"),
    "plain-blocks": Entry("small_gpt", "plain_blocks"),
}
"""What `peers` runs unless told otherwise."""

NARROW = {"layers": 12, "width": 128, "length": 128, "batch": 4}
UNTOUCHED: dict[str, Entry] = {
    "bert-narrow": Entry("language", "bert_like", {**NARROW, "attention": "sdpa"}),
    "llama-narrow": Entry("language", "llama_like", {**NARROW, "vocabulary": 1000}),
    "tiny-blocks": Entry("small_gpt", "plain_blocks", {"layers": 8, "width": 32, "heads": 2, "length": 16, "batch": 2}),
    "gpt2-narrow": Entry("language", "gpt2_like", {**NARROW, "vocabulary": 1000}),
}
"""Steps so short that what a captured graph costs beside the work can be seen."""

TINY: dict[str, Entry] = {
    "tiny-gpt": Entry(
        "small_gpt", "small_gpt", {"layers": 4, "width": 32, "length": 64, "batch": 2, "vocabulary": 512}
    ),
}
"""For the tests of the benchmark itself."""


def entry(name: str) -> Entry:
    """The model called `name`; raises KeyError."""
    return {**MODELS, **UNTOUCHED, **TINY}[name]
