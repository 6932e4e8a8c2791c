"""What the laws are drawn over: pipelines of every registered pass, and models with batches."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from hypothesis import strategies as st
from torch import nn

import rewrite
from rewrite import registry
from tests.zoo import ZOO, Entry, Mask
from tests.zoo.entry import Inputs

VARIANTS = {
    "checkpoint": ("checkpoint", "checkpoint{policy=sqrt}", "checkpoint{every=2}"),
    "chunk-ffn": ("chunk-ffn{chunks=3}",),
    "chunk-loss": ("chunk-loss{chunks=3}",),
}
"""Option texts worth a law of their own; a pass without an entry is taken as it comes."""
QUICK = ("bert", "llama", "mixtral", "t5", "vit", "plain-resnet", "plain-unet", "plain-branching")
FIXED_LENGTH = ("vit", "clip", "swin", "convnext")
"""Models whose length is not free; their shapes give the lengths there are."""


def alone() -> tuple[str, ...]:
    """Every pass by itself, as spec text."""
    return tuple(itertools.chain.from_iterable(VARIANTS.get(name, (name,)) for name in registry.names()))


def pipelines() -> tuple[str, ...]:
    """The empty pipeline, every pass alone, and every ordered pair, a pass after itself included."""
    return ("", *alone(), *(f"{first},{second}" for first, second in itertools.product(alone(), repeat=2)))


@dataclass(frozen=True)
class Subject:
    """A model and its rewrite."""

    entry: Entry
    pipeline: str
    model: nn.Module
    small: nn.Module

    def passes(self) -> list[object]:
        return parsed(self.pipeline)


def parsed(pipeline: str) -> list[object]:
    """The passes of a spec text; none for ""."""
    from rewrite import spec

    return list(spec.parse(pipeline, registry.load)) if pipeline else []


@functools.lru_cache(maxsize=64)
def subject(name: str, pipeline: str) -> Subject:
    """Built once for a model and a pipeline; a law leaves it as it found it."""
    entry = ZOO[name]
    model = entry.build()
    inputs = entry.inputs(*entry.shapes[0], entry.masks[0])
    return Subject(entry, pipeline, model, rewrite.optimize(model, passes=parsed(pipeline), example_inputs=inputs))


def subjects(names: tuple[str, ...]) -> st.SearchStrategy[Subject]:
    """A model of `names` under a pipeline."""
    return st.builds(subject, st.sampled_from(names), st.sampled_from(pipelines()))


@st.composite
def batches(draw: st.DrawFn, entry: Entry) -> Inputs:
    """A batch of a size, length and mask kind the model takes."""
    mask: Mask = draw(st.sampled_from(entry.masks))
    batch = draw(st.integers(1 if "norm" not in entry.name and "resnet" not in entry.name else 2, 4))
    lengths = [length for _, length in entry.shapes]
    fixed = entry.name in FIXED_LENGTH or (mask == "absent" and len(entry.masks) == 1)
    length = draw(st.sampled_from(lengths) if fixed else st.integers(min(lengths) - 2, max(lengths) + 4))
    return entry.inputs(batch, length, mask, seed=draw(st.integers(0, 99)))
