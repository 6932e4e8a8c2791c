"""The optimizers of torch, which take no state but of their own kind."""

from __future__ import annotations

import torch

from rewrite.optim.state import CheckedState


class AdamW(CheckedState, torch.optim.AdamW):
    """`torch.optim.AdamW`."""

    kind = "adamw"


class Adam(CheckedState, torch.optim.Adam):
    """`torch.optim.Adam`."""

    kind = "adam"


class SGD(CheckedState, torch.optim.SGD):
    """`torch.optim.SGD`."""

    kind = "sgd"


CLASSES: dict[str, type[torch.optim.Optimizer]] = {kind.kind: kind for kind in (AdamW, Adam, SGD)}
