"""Buffers that a forward writes are written once: a recompute writes to copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def copied_buffers(module: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """Let what runs write to copies of the buffers at `paths` below `module`."""
    if not paths:
        yield
        return
    with buffers_as(module, {path: module.get_buffer(path) for path in paths}):
        yield


@contextlib.contextmanager
def buffers_as(module: nn.Module, contents: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let what runs read, and write, copies of `contents` in place of the buffers at those paths."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for path, content in contents.items():
        owner, _, name = path.rpartition(".")
        table = module.get_submodule(owner)._buffers
        replaced.append((table, name, table[name]))
        table[name] = content.detach().clone()
    try:
        yield
    finally:
        for table, name, buffer in replaced:
            table[name] = buffer
