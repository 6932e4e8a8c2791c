"""Which calls may draw random numbers: where it is not known, they may."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rewrite.capture.structure import is_quantized

RANDOM_NAMES = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "poisson", "binomial", "dirichlet",
                "exponential", "geometric", "cauchy", "gumbel", "rrelu", "fractional_max_pool",
                "_standard_gamma")  # fmt: skip
"""Parts of the names of torch functions that draw."""

NOT_RANDOM = ("normalize", "poisson_nll_loss", "__rand__")
"""Parts of names that hold one of the above and do not draw."""

MAYBE_RANDOM = ("scaled_dot_product_attention", "multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu")
"""Functions that draw if they are given a dropout probability."""

_DRAWING = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.RNNBase, nn.MultiheadAttention, nn.FractionalMaxPool2d,
            nn.FractionalMaxPool3d)  # fmt: skip


def draws_in_module(module: nn.Module) -> bool:
    """Whether a call of a layer may draw; layers from elsewhere than torch.nn may, but for quantized ones."""
    return any(isinstance(each, _DRAWING) or not _is_known(each) for each in module.modules())


def _is_known(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn") or is_quantized(module)


def draws(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a torch function may draw."""
    if name in MAYBE_RANDOM:
        given = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return name != "scaled_dot_product_attention" or not (isinstance(given, (int, float)) and given == 0)
    if name.startswith("_scaled_dot_product") or name in ("_cudnn_rnn", "miopen_rnn"):
        return True
    if any(part in name for part in RANDOM_NAMES) and not any(part in name for part in NOT_RANDOM):
        return True
    return not _of_torch(func)


def _of_torch(func: Callable[..., Any]) -> bool:
    if isinstance(func, torch._ops.OpOverload):
        return func.namespace in ("aten", "prims") and torch.Tag.nondeterministic_seeded not in func.tags
    if isinstance(func, torch._ops.OpOverloadPacket):
        return all(_of_torch(getattr(func, overload)) for overload in func.overloads())
    home = getattr(func, "__module__", None) or ""
    return home == "" or home.startswith(("torch", "_operator", "operator", "builtins"))
