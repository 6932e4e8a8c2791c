"""Fake tensors in place of a call's arguments and of a model's parameters and buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rewrite import calls
from rewrite.capture import private
from rewrite.capture.answers import Answers
from rewrite.capture.structure import join_path
from rewrite.capture.surroundings import Kept, configs
from rewrite.capture.symbols import symbolic_dimensions


class Fakes:
    """Makes fakes of one mode. What is on the meta device, or a DTensor, becomes a plain fake of the full size."""

    def __init__(self, mode: private.FakeTensorMode) -> None:
        self.mode = mode

    def arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], level: int
    ) -> tuple[tuple[Any, ...], dict[str, Any], Answers]:
        """The call with fakes, their sizes symbolic as `symbolic_dimensions` has it, and their real values aside."""
        parts = calls.split((args, kwargs))
        tensors = [leaf for leaf in parts.leaves if isinstance(leaf, torch.Tensor)]
        dimensions = iter(symbolic_dimensions(tensors, level))
        leaves: list[Any] = []
        real: dict[int, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}
        for index, leaf in enumerate(parts.leaves):
            if not isinstance(leaf, torch.Tensor):
                leaves.append(leaf)
                continue
            dynamic = next(dimensions)
            if id(leaf) not in made:
                made[id(leaf)] = self._argument(leaf, index, dynamic)
                real[id(made[id(leaf)])] = leaf
            leaves.append(made[id(leaf)])
        fake_args, fake_kwargs = calls.rebuild(parts.skeleton, leaves)
        return fake_args, fake_kwargs, Answers(real)

    def _argument(self, tensor: torch.Tensor, index: int, dynamic: set[int]) -> torch.Tensor:
        plain = tensor.detach()
        if plain.is_meta:
            plain = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype)
        fake = private.make_fake(self.mode, plain, f"input_{index}", dynamic)
        return fake.requires_grad_(tensor.requires_grad)

    @contextlib.contextmanager
    def in_place(self, root: nn.Module, root_path: str, names: dict[int, list[str]]) -> Iterator[None]:
        """Put fakes in place of every parameter and buffer, and everything back as it was at the end.

        `names` is given the paths of each fake, by its id.
        """
        fakes: dict[int, torch.Tensor] = {}
        owners = [module for module in root.modules() if not isinstance(module, torch.jit.ScriptModule)]
        kept = [Kept(vars(owner)) for owner in [*owners, *configs(root)]]
        originals = {id(module): {**module._parameters, **module._buffers} for module in owners}
        for path, module in root.named_modules(remove_duplicate=False):
            for name, tensor in originals.get(id(module), {}).items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    fakes[id(tensor)] = self._state(tensor)
                table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
                table[name] = fakes[id(tensor)]
                names.setdefault(id(fakes[id(tensor)]), []).append(join_path(join_path(root_path, path), name))
        try:
            yield
        finally:
            for content in kept:
                content.restore()

    def _state(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta or type(tensor).__name__ == "DTensor":
            device = "cpu" if tensor.is_meta else tensor.device
            with self.mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        else:
            fake = private.make_fake(self.mode, tensor.detach(), "state", set())
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)
