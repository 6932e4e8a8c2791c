"""The optimizers there are, and what each keeps. Imports no torch, so that the command line can list them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rewrite.errors import InputError


@dataclass(frozen=True)
class Kind:
    """One optimizer by its name."""

    name: str
    family: str
    """"adam", "sgd" or "lion": kinds of one family keep the same moments, in other types."""
    bits: int
    """Of the moments: 32, or 8 where a parameter is large enough."""
    library: str
    """"torch" or "bitsandbytes"."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options beside `lr` and `weight_decay`, with their defaults."""
    weight_decay: float = 0.0
    decays_as_adamw: bool = True
    """Whether weight decay acts on the weights, beside the gradient."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the moments in a state dict."""
        if self.library == "bitsandbytes":
            return ("state1", "state2") if self.family == "adam" else ("state1",)
        return ("exp_avg", "exp_avg_sq") if self.family == "adam" else ("momentum_buffer",)

    @property
    def layout(self) -> str:
        """The state in words, for messages."""
        bits = "32 bits" if self.bits == 32 else "8 bits"
        return f"{self.library}, {bits}: {', '.join(self.keys)}"


_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
_LION = {"betas": (0.9, 0.99)}

KINDS = {
    kind.name: kind
    for kind in (
        Kind("adamw", "adam", 32, "torch", _ADAM, 0.01),
        Kind("adamw8bit", "adam", 8, "bitsandbytes", _ADAM, 0.01),
        Kind("adam", "adam", 32, "torch", _ADAM, decays_as_adamw=False),
        Kind("adam8bit", "adam", 8, "bitsandbytes", _ADAM),
        Kind("lion", "lion", 32, "bitsandbytes", _LION),
        Kind("lion8bit", "lion", 8, "bitsandbytes", _LION),
        Kind("sgd", "sgd", 32, "torch", {"momentum": 0.0}, decays_as_adamw=False),
        Kind("sgd8bit", "sgd", 8, "bitsandbytes", {"momentum": 0.9}, decays_as_adamw=False),
    )
}

OPTIMIZERS = (*KINDS, "none")
"""What a step can be counted with."""


def check_optimizer(name: Any) -> None:
    """Raise InputError unless it is None, or the name of one of these."""
    if name is None or (isinstance(name, str) and name in OPTIMIZERS):
        return
    subject = f"optimizer {name!r}" if isinstance(name, str) else f"an optimizer of type {type(name).__name__}"
    cause = "it is not known" if isinstance(name, str) else "a step is counted with one that is named"
    raise InputError(subject, cause, f"choose one of: {', '.join(OPTIMIZERS)}")
