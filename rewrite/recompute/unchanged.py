"""A recompute is only right from the weights the forward ran with: notice any that were changed or replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import nn

from rewrite.errors import RecomputeError

Owners = Callable[[nn.Module], tuple[nn.Module, ...]]
"""The modules below a region's own whose parameters a segment reads."""


class Weights:
    """The parameters of some modules, as they are now."""

    __slots__ = ("held",)

    def __init__(self, owners: tuple[nn.Module, ...]) -> None:
        self.held = [
            (table, name, parameter, parameter._version)
            for table in _tables(owners)
            for name, parameter in table.items()
            if parameter is not None
        ]

    def check(self, path: str) -> None:
        """Raise RecomputeError if one was changed in place or replaced since."""
        for table, name, parameter, version in self.held:
            found = table.get(name)
            if found is parameter and found._version != version:
                raise changed(path, f"parameter {name!r} was changed in place")
            if found is not parameter and not any(type(each).__name__ == "DTensor" for each in (found, parameter)):
                raise changed(path, f"parameter {name!r} was replaced")


def _tables(owners: tuple[nn.Module, ...]) -> Iterator[Mapping[str, nn.Parameter | None]]:
    for owner in owners:
        yield owner._parameters
        if owner._modules:
            yield from (inner._parameters for inner in owner.modules() if inner is not owner)


def changed(path: str, what: str) -> RecomputeError:
    """The error for a recompute that would not give the values of the forward."""
    return RecomputeError(
        f"recompute of {path or 'the model'!r}",
        f"{what} between the forward and the backward that recomputes from it",
        "call backward before the optimizer step (or before the in-place change), or leave it out of Checkpoint",
    )
