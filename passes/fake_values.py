"""What a node gives, as a fake, after its dtype has changed; and what a node that a pass adds is known by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rewrite import ORIGIN, RECOMPUTE

if TYPE_CHECKING:
    from torch.fx import Node


def describe(made: Node, origin: Node, value: Any, reader: Node) -> None:
    """Say of a node that was made from `origin` for `reader` what it gives and where it stands."""
    made.meta.update({key: reader.meta[key] for key in ("module_path", "source") if key in reader.meta})
    made.meta["val"] = value
    made.meta[ORIGIN] = (origin.name,)
    share_segment(made, reader)


def share_segment(made: Node, reader: Node) -> None:
    """Have a node recomputed together with what reads it."""
    if RECOMPUTE in reader.meta:
        made.meta[RECOMPUTE] = reader.meta[RECOMPUTE]


def cast_value(value: Any, dtype: torch.dtype, *, fresh: bool) -> Any:
    """A fake of `value.to(dtype)`."""
    if fresh:
        return like(value, dtype)
    with value.fake_mode, torch.no_grad():
        return value.detach().to(dtype).requires_grad_(value.requires_grad)


def like(value: Any, dtype: torch.dtype) -> Any:
    """A fake of the same shape and strides, in storage of its own."""
    with value.fake_mode, torch.no_grad():
        return torch.empty_strided(value.size(), value.stride(), dtype=dtype).requires_grad_(value.requires_grad)


def turned(value: Any) -> Any:
    """A fake of `value.t()`."""
    with value.fake_mode, torch.no_grad():
        return value.detach().t().requires_grad_(value.requires_grad)


def same_view(had: Any, was: Any, now: Any, dtype: torch.dtype) -> Any:
    """What `had`, which lay in the storage of `was`, is now that `now` stands in the place of `was`."""
    if had is was:
        return now
    if not hasattr(now, "untyped_storage") or now.dtype != dtype or now.stride() != was.stride():
        return had if dtype == had.dtype else like(had, dtype)
    if now is was:
        return had
    with had.fake_mode, torch.no_grad():
        view = now.detach().as_strided(had.size(), had.stride(), had.storage_offset())
    return view.requires_grad_(had.requires_grad)
