"""Freeze parts of a model by path, and say what that saves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rewrite.errors import InputError, ModelError, SelectorError
from rewrite.memory.optimizer import build_optimizer
from rewrite.report.sizes import size_text
from rewrite.selectors import matches


@dataclass(frozen=True)
class Frozen:
    """What `freeze` froze."""

    parameters: tuple[str, ...]
    """Names of the parameters that were trained before, as `named_parameters` has them: a tied one under its first."""
    modules: tuple[str, ...]
    """Paths of the outermost modules of which no parameter is trained now."""
    shapes: tuple[tuple[torch.Size, torch.dtype], ...]
    """Of each parameter."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that a backward makes no more."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self.shapes)

    def state_bytes(self, optimizer: str = "adamw") -> int:
        """Bytes of state that an optimizer ("adamw", "adam", "sgd") made from here on does not hold for them.

        Measured on parameters without content. Raises InputError for another name.
        """
        if optimizer not in ("adamw", "adam", "sgd"):
            cause = "its state depends on the layer a weight belongs to"
            raise InputError(f"optimizer {optimizer!r}", cause, "compare rewrite.estimate before and after freezing")
        alone = nn.ParameterList(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in self.shapes)
        made = build_optimizer(optimizer, alone, "cpu")
        return sum(tensor.nbytes for tensor in made.state_tensors()) if made is not None else 0

    def __str__(self) -> str:
        """In one sentence."""
        saved = (
            f"saves {size_text(self.gradient_bytes)} of gradients and {size_text(self.state_bytes())} of AdamW state"
        )
        count = sum(shape.numel() for shape, _ in self.shapes)
        return f"froze {count:,} numbers in {len(self.parameters)} parameters, which {saved}"


def freeze(model: nn.Module, *selectors: str | Iterable[str]) -> Frozen:
    """Freeze, in place, every parameter that a selector selects, itself or with a module around it.

    Selectors, or lists of them, are globs of paths (`encoder.layer.[0-11]`, `**.LayerNorm`, `**.bias`), as
    `named_parameters` has them or, for a model of transformers with a head, below its base model: `embeddings` is
    `bert.embeddings` too. Gradients that
    are there already go, as an optimizer's step would still use them. A model that was optimized is planned anew at its
    next call. Freeze before wrapping it in DDP or FSDP, and before making an optimizer.

    Raises SelectorError for a selector that selects nothing, before anything is frozen; ModelError for no module.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            "model", f"freeze takes a torch.nn.Module, not {type(model).__name__}", "pass the module itself"
        )
    chosen_by = tuple(_texts(selectors))
    if not chosen_by:
        raise SelectorError("freeze", "no selector is given", 'name what to freeze, as freeze(model, "embeddings")')
    named = list(model.named_parameters(remove_duplicate=False))
    chosen: dict[int, nn.Parameter] = {}
    for selector in chosen_by:
        found = {id(each): each for name, each in named if _selects(selector, name, model)}
        if not found:
            raise SelectorError(
                f"freeze {selector!r}",
                "it selects no parameter",
                f"use paths such as {', '.join(_some_paths(named))}, with * for one component and ** for any number",
            )
        chosen |= found
    newly = [(name, each) for name, each in model.named_parameters() if id(each) in chosen and each.requires_grad]
    for parameter in chosen.values():
        parameter.requires_grad_(False)
        parameter.grad = None
    names, shapes = [name for name, _ in newly], [(each.shape, each.dtype) for _, each in newly]
    return Frozen(tuple(names), tuple(_outermost_frozen(model)), tuple(shapes))


def _texts(selectors: Iterable[Any]) -> Iterator[str]:
    """Selectors one by one. Raises SelectorError for what is no text and holds none."""
    for selector in selectors:
        if isinstance(selector, str):
            yield selector
        elif isinstance(selector, (list, tuple, set, frozenset)):
            yield from _texts(selector)
        else:
            cause = f"a selector is a text, or a list of texts, not {type(selector).__name__}"
            raise SelectorError(f"freeze {selector!r}", cause, 'name what to freeze, as freeze(model, "embeddings")')


def _selects(selector: str, name: str, model: nn.Module) -> bool:
    prefix = getattr(model, "base_model_prefix", "")
    below = name.removeprefix(f"{prefix}.") if isinstance(prefix, str) and prefix else name
    return matches(selector, name) or matches(selector, below)


def _some_paths(named: Sequence[tuple[str, nn.Parameter]]) -> list[str]:
    """A few paths that selectors could start from."""
    owners = [name.rpartition(".")[0] or name for name, _ in named]
    return list(dict.fromkeys((owners[0], owners[len(owners) // 2], owners[-1]))) if owners else ["(it has none)"]


def _outermost_frozen(module: nn.Module, path: str = "") -> Iterator[str]:
    weights = list(module.parameters())
    if weights and not any(weight.requires_grad for weight in weights):
        yield path
        return
    for name, child in module.named_children():
        yield from _outermost_frozen(child, f"{path}.{name}".lstrip("."))
