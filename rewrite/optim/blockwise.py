"""The optimizers of bitsandbytes: moments in blocks of 256 elements, one byte an element and one float32 a block.

What bitsandbytes does otherwise is put right here. It finds the parameters that stay in 32 bits by `id` in a manager
of the whole process, so that a copy of a model loses them and a later model may inherit them; here they stand in the
parameter groups. A copied or unpickled optimizer of its own cannot step. Its kernels write to `parameter.data`, which
hides the change from autograd and from everything that goes by a parameter's version; here the version moves.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import GlobalPageManager
from bitsandbytes.optim import GlobalOptimManager

from rewrite.optim.state import CheckedState

_CARRIED = ("initialized", "name2qmap", "is_paged", "mng", "non_castable_tensor_keys", "args", "optimizer_name")


class BlockwiseState(CheckedState):
    """What all of them share. Goes before the class of bitsandbytes among the bases."""

    state: Any
    name2qmap: dict[str, torch.Tensor]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mng = GlobalOptimManager.__new__(GlobalOptimManager)
        self.mng.initialize()

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """The options of one parameter, `optim_bits` among them."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)  # type: ignore[misc]
        config["optim_bits"] = group["state_bits"][pindex]
        return config

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: torch.Tensor, gindex: int, pindex: int) -> None:
        """Update one parameter, and move its version."""
        super().update_step(group, p, gindex, pindex)  # type: ignore[misc]
        torch.autograd.graph.increment_version(p)

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As `CheckedState`; parameters share their code books again."""
        super().load_state_dict(state_dict, *args, **kwargs)
        shared: dict[Any, torch.Tensor] = {}
        for entry in self.state.values():
            for key in ("qmap1", "qmap2"):
                if key in entry:
                    entry[key] = shared.setdefault((key, entry[key].device), entry[key])

    def __getstate__(self) -> dict[str, Any]:
        carried = {name: vars(self)[name] for name in _CARRIED}
        return {**super().__getstate__(), **carried}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self.page_mng = GlobalPageManager.get_instance()


class AdamW8bit(BlockwiseState, bnb.optim.AdamW8bit):
    """`bitsandbytes.optim.AdamW8bit`."""

    kind = "adamw8bit"


class Adam8bit(BlockwiseState, bnb.optim.Adam8bit):
    """`bitsandbytes.optim.Adam8bit`."""

    kind = "adam8bit"


class Lion(BlockwiseState, bnb.optim.Lion32bit):
    """`bitsandbytes.optim.Lion`."""

    kind = "lion"


class Lion8bit(BlockwiseState, bnb.optim.Lion8bit):
    """`bitsandbytes.optim.Lion8bit`."""

    kind = "lion8bit"


class SGD8bit(BlockwiseState, bnb.optim.SGD8bit):
    """`bitsandbytes.optim.SGD8bit`: with momentum."""

    kind = "sgd8bit"


CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    kind.kind: kind for kind in (AdamW8bit, Adam8bit, Lion, Lion8bit, SGD8bit)
}
