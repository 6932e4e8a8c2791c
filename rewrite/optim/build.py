"""From a model and a name to an optimizer."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rewrite.errors import InputError, OptimizerError
from rewrite.optim.groups import Named, decayed, in_full, require_trainable, state_bits
from rewrite.optim.kinds import KINDS, Kind


def optimizer(
    model: nn.Module,
    name: str,
    *,
    lr: float,
    weight_decay: float | None = None,
    embedding_bits: int = 32,
    keep_fp32: Sequence[str] = (),
    **options: Any,
) -> torch.optim.Optimizer:
    """An optimizer over what trains in `model`, rewritten or not: "adamw", "adamw8bit", "adam", "adam8bit", "lion",
    "lion8bit", "sgd" or "sgd8bit".

    The first parameter group decays by `weight_decay` (the default is the class's own: 0.01 for the two AdamW, else
    0); the second, which holds biases and the parameters of norms, does not. Frozen parameters are left out.
    `options` go to the optimizer: `betas` and `eps` for the Adams, `betas` for Lion, `momentum` for SGD (0 in 32
    bits, 0.9 in 8).

    The 8-bit kinds, and Lion, are those of bitsandbytes, on CPU and CUDA. They keep moments in 8 bits (Dettmers et
    al., 8-bit Optimizers via Block-wise Quantization, ICLR 2022), and in 32 for parameters of fewer than 4096
    elements, for embeddings (unless `embedding_bits=8`), and for what the path globs in `keep_fp32` select. Which
    those are is read off the model's own parameter objects: copies and rewrites of a model have their own, and the
    overrides in the process-wide manager of bitsandbytes are not read.

    `state_dict()` is that of the class, with the kind, the names and the widths in the groups. `load_state_dict` takes
    no state of another kind, of other parameters or of other widths: `convert_optimizer_state` converts one. The order
    of the parameters is the model's, which a rewrite keeps: a state that was saved before a rewrite loads after it.
    What thaws later comes in by `add_param_group`, with names, and starts without moments.

    Raises InputError for unknown names and options and for a model of which nothing trains, SelectorError for a
    selector that matches nothing, OptimizerError when bitsandbytes is missing or cannot take the parameters.
    """
    kind = kind_named(name)
    _check_options(kind, options, embedding_bits)
    require_trainable(model)
    decay = kind.weight_decay if weight_decay is None else weight_decay
    if kind.name == "adam8bit" and decay:
        raise InputError(
            "optimizer 'adam8bit'",
            f"weight_decay is {decay}, and bitsandbytes decays the weights themselves, as AdamW does, not the gradient",
            "take adamw8bit",
        )
    full = in_full(model, keep_fp32, embeddings=embedding_bits == 32)
    groups = [
        _group(kind, named, full, weight_decay=amount)
        for named, amount in zip(decayed(model), (decay, 0.0), strict=True)
        if named
    ]
    make = _classes(kind, model)[kind.name]
    made = make(groups, lr=lr, weight_decay=decay, **{**kind.options, **options})  # type: ignore[call-arg]
    made.in_full = tuple(name for name, parameter in model.named_parameters() if id(parameter) in full)  # type: ignore[attr-defined]
    return made


def kind_named(name: str) -> Kind:
    """The kind of that name; raises InputError."""
    if name not in KINDS:
        raise InputError(f"optimizer {name!r}", "it is not known", f"choose one of: {', '.join(KINDS)}")
    return KINDS[name]


def _group(kind: Kind, named: list[Named], full: set[int], *, weight_decay: float) -> dict[str, Any]:
    bits = [state_bits(parameter, full) if kind.bits == 8 else 32 for _, parameter in named]
    return {"params": named, "weight_decay": weight_decay, "kind": kind.name, "state_bits": bits}


def _check_options(kind: Kind, options: dict[str, Any], embedding_bits: int) -> None:
    if embedding_bits not in (8, 32):
        raise InputError("embedding_bits", f"it is {embedding_bits!r}", "give 8 or 32")
    for option in options:
        if option not in kind.options:
            there_are = ", ".join(("lr", "weight_decay", "embedding_bits", "keep_fp32", *kind.options))
            raise InputError(f"optimizer {kind.name!r}", f"it has no option {option!r}", f"its options are {there_are}")


def _classes(kind: Kind, model: nn.Module) -> dict[str, type[torch.optim.Optimizer]]:
    if kind.library == "torch":
        from rewrite.optim.plain import CLASSES as TORCH

        return TORCH
    if importlib.util.find_spec("bitsandbytes") is None:
        raise OptimizerError(
            f"optimizer {kind.name!r}",
            "it is that of bitsandbytes, which is not installed",
            "install it: pip install 'rewrite-torch[bitsandbytes]'",
        )
    sharded = next((path for path, each in model.named_parameters() if type(each).__name__ == "DTensor"), None)
    if sharded is not None:
        raise OptimizerError(
            f"optimizer {kind.name!r}",
            f"{sharded} is sharded (DTensor), which the kernels of bitsandbytes do not take",
            "take adamw or adam, whose state is sharded with the parameters",
        )
    from rewrite.optim.blockwise import CLASSES

    return CLASSES
