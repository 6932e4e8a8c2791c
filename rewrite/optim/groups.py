"""Which parameters an optimizer takes, which of them decay, and in how many bits each keeps its moments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from rewrite.errors import InputError, SelectorError
from rewrite.selectors import matches

SMALLEST_IN_8_BITS = 4096
"""Elements; the moments of a smaller parameter stay in 32 bits (`min_8bit_size` of bitsandbytes)."""

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm)

Named = tuple[str, nn.Parameter]


def trainable(model: nn.Module) -> list[Named]:
    """The parameters that train, with their names, each once, in the order of `named_parameters()`."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def decayed(model: nn.Module) -> tuple[list[Named], list[Named]]:
    """The trainable parameters that decay, and those that do not: vectors (biases) and all of a norm."""
    norms = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _NORMS) or type(module).__name__.endswith("Norm")
        for parameter in module.parameters(recurse=False)
    }
    decay: list[Named] = []
    rest: list[Named] = []
    for name, parameter in trainable(model):
        (rest if parameter.ndim < 2 or id(parameter) in norms else decay).append((name, parameter))
    return decay, rest


def in_full(model: nn.Module, selectors: Sequence[str] = (), *, embeddings: bool = True) -> set[int]:
    """Ids of the parameters whose moments stay in 32 bits, whatever their size.

    Those of embeddings, and those that a selector names, by the path of the parameter or of a module above it. A
    parameter counts as the object it is: a head tied to an embedding is the embedding's. The ids hold for as long as
    `model` does. Raises SelectorError for a selector that matches nothing.
    """
    found = set(_of_embeddings(model)) if embeddings else set()
    paths = list(model.named_parameters(remove_duplicate=False))
    for selector in selectors:
        selected = {id(parameter) for path, parameter in paths if matches(selector, path)}
        if not selected:
            raise SelectorError(
                f"keep_fp32 {selector!r}",
                "it matches no parameter of the model",
                "name parameters or modules as named_parameters() does, such as "
                f"{paths[0][0] if paths else 'head.weight'!r}",
            )
        found |= selected
    return found


def state_bits(parameter: nn.Parameter, full: set[int]) -> int:
    """8 or 32: the width of the moments an 8-bit optimizer keeps for `parameter`."""
    return 32 if id(parameter) in full or parameter.numel() < SMALLEST_IN_8_BITS else 8


def require_trainable(model: nn.Module) -> None:
    """Raise InputError for a model of which nothing trains."""
    if not trainable(model):
        raise InputError(
            "optimizer",
            "no parameter of the model requires a gradient",
            "unfreeze what should train (`parameter.requires_grad_(True)`) before the optimizer is made",
        )


def _of_embeddings(model: nn.Module) -> Iterator[int]:
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield from map(id, module.parameters(recurse=False))
