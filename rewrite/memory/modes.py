"""A model in training or eval mode for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from rewrite.capture.surroundings import Kept, configs


@contextlib.contextmanager
def in_mode(module: nn.Module, train: bool) -> Iterator[None]:
    """Put the tree in the wanted mode; a training model keeps the parts its owner put in eval.

    Options that the forward settles in a config are put back.
    """
    before = [(each, each.training) for each in module.modules()]
    settled = [Kept(vars(config)) for config in configs(module)]
    if train != module.training:
        module.train(train)
    try:
        yield
    finally:
        for config in settled:
            config.restore()
        for each, flag in before:
            each.training = flag
