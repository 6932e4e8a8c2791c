"""Modules that stay in eval mode, whatever `train()` says to the model around them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn


class HeldInEval:
    """Stands as `train` in the `__dict__` of a module; the modules below it see to themselves."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.asked = module.training
        """The mode that the module would be in."""
        module.training = False

    def __call__(self, mode: bool = True) -> nn.Module:
        self.asked = mode
        told: nn.Module = type(self.module).train(self.module, mode)
        told.training = False
        return told


def hold(module: nn.Module) -> None:
    """Hold the module."""
    if not is_held(module):
        vars(module)["train"] = HeldInEval(module)


def is_held(module: nn.Module) -> bool:
    """Whether the module is held."""
    return isinstance(vars(module).get("train"), HeldInEval)


def release(module: nn.Module) -> None:
    """Give `module`, if it is held, the mode that was asked for since."""
    if is_held(module):
        module.training = vars(module).pop("train").asked


def hold_below(root: nn.Module, wanted: Iterable[str], judged: Collection[str]) -> bool:
    """Hold all modules at and below the paths `wanted`, and release all others at and below those `judged`.

    Returns whether any module changed.
    """
    chosen = {id(module) for path in wanted for module in root.get_submodule(path).modules()}
    changed = False
    for path, module in root.named_modules():
        if id(module) in chosen and not is_held(module):
            hold(module)
            changed = True
        elif id(module) not in chosen and is_held(module) and any(_is_within(path, place) for place in judged):
            release(module)
            changed = True
    return changed


def _is_within(path: str, place: str) -> bool:
    return not place or path == place or path.startswith(f"{place}.")
