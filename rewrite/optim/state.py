"""What kind of optimizer a state dict is of, and whether an optimizer can take it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rewrite.errors import OptimizerError
from rewrite.optim.groups import state_bits
from rewrite.optim.kinds import KINDS, Kind

WRAPPED = "__bnb_optimizer_quant_state__"
"""The key under which bitsandbytes wraps what it quantized, so that FSDP passes it by."""

CONVERT = "load rewrite.convert_optimizer_state(state, optimizer) in its place"


def entries(state: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    """The state of each parameter, by its number, with nothing wrapped."""
    unwrapped = {}
    for number, entry in state["state"].items():
        inner = {key: value for key, value in entry.items() if key != WRAPPED}
        unwrapped[number] = {**inner, **entry.get(WRAPPED, {})}
    return unwrapped


def kinds_of(state: Mapping[str, Any]) -> tuple[Kind, ...]:
    """The kinds whose state this may be: one where it says so, several where they look the same, none if unknown.

    All of them for the state of an optimizer that has not made a step.
    """
    groups = state["param_groups"]
    named = {group["kind"] for group in groups if group.get("kind") in KINDS}
    if len(named) == 1:
        return (KINDS[named.pop()],)
    held = [entry for entry in entries(state).values() if any(value is not None for value in entry.values())]
    if not held:
        return tuple(KINDS.values())
    keys = {key for entry in held for key in entry}
    candidates = [kind for kind in KINDS.values() if set(kind.keys) == keys & _ALL_KEYS]
    decoupled = groups[0].get("decoupled_weight_decay")
    if decoupled is not None:
        candidates = [kind for kind in candidates if kind.decays_as_adamw == decoupled]
    if {"state1"} <= keys:
        in_8_bits = any(entry["state1"].dtype == torch.uint8 for entry in held)
        candidates = [kind for kind in candidates if kind.bits == 8 or not in_8_bits]
    return tuple(candidates)


_ALL_KEYS = {key for kind in KINDS.values() for key in kind.keys}


def described(state: Mapping[str, Any]) -> str:
    """The kind of a state in words, for messages."""
    kinds = kinds_of(state)
    if kinds:
        return f"{' or '.join(kind.name for kind in kinds)} ({kinds[0].layout})"
    keys = sorted({key for entry in entries(state).values() for key in entry})
    return f"an optimizer that is not known here ({', '.join(keys)})"


def check(state: Mapping[str, Any], kind: Kind, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise OptimizerError unless `state` can go into an optimizer of `kind` with these parameter groups."""
    if kind not in kinds_of(state):
        raise OptimizerError(
            "optimizer state",
            f"it is of {described(state)}, and this optimizer is {kind.name} ({kind.layout})",
            f"{CONVERT}, or make the optimizer that the state is of",
        )
    saved = state["param_groups"]
    theirs, ours = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if theirs != ours:
        raise OptimizerError(
            "optimizer state",
            f"its parameter groups hold {_counts(theirs)} parameters, and this optimizer's hold {_counts(ours)}",
            f"{CONVERT}, with `model` given if its groups name no parameters; or freeze what was frozen then",
        )
    held = entries(state)
    for name, other, parameter, entry, bits in _pairs(saved, groups, held):
        _check_name(name, other)
        _check_entry(name or "a parameter", parameter, entry, bits if kind.bits == 8 else 32)


def _pairs(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]], held: Mapping[Any, dict[str, Any]]
) -> Iterator[tuple[str, str, nn.Parameter, dict[str, Any], int]]:
    for theirs, ours in zip(saved, groups, strict=True):
        blank = [""] * len(ours["params"])
        rows = zip(
            theirs["params"],
            ours["params"],
            theirs.get("param_names", blank),
            ours.get("param_names", blank),
            ours.get("state_bits", [32] * len(blank)),
            strict=True,
        )
        for number, parameter, other, name, bits in rows:
            yield name, other, parameter, held.get(number, {}), bits


def is_same_parameter(name: str, other: str) -> bool:
    """Whether two names are of one parameter: they may differ by what a wrapper (DDP, peft) put before them."""
    return name == other or name.endswith(f".{other}") or other.endswith(f".{name}")


def _check_name(name: str, other: str) -> None:
    if not name or not other or is_same_parameter(name, other):
        return
    raise OptimizerError(
        "optimizer state",
        f"it holds {other!r} in the place where this optimizer holds {name!r}",
        f"{CONVERT}: it goes by the names",
    )


def _check_entry(name: str, parameter: nn.Parameter, entry: Mapping[str, Any], bits: int) -> None:
    for key in sorted(_ALL_KEYS & set(entry)):
        moment = entry[key]
        if moment is None:
            continue
        if moment.shape != parameter.shape:
            raise OptimizerError(
                f"optimizer state of {name}",
                f"its {key} has the shape {tuple(moment.shape)}, and the parameter {tuple(parameter.shape)}",
                "load the state of this model's optimizer",
            )
        found = 8 if moment.dtype == torch.uint8 else 32
        if found != bits:
            raise OptimizerError(
                f"optimizer state of {name}",
                f"its {key} is kept in {found} bits, and this optimizer keeps it in {bits}",
                f"{CONVERT}, or give the same keep_fp32 and embedding_bits as then",
            )


def _counts(numbers: Sequence[int]) -> str:
    return " + ".join(map(str, numbers))


class CheckedState:
    """An optimizer that takes no state but of its own kind. Goes before the optimizer's class among the bases."""

    kind: str
    param_groups: list[dict[str, Any]]
    in_full: tuple[str, ...] = ()
    """Names of parameters of the model whose moments stay in 32 bits, of those too that are frozen so far."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, for what thaws later: give names, as `list(layer.named_parameters("encoder.layer.11"))`.

        Moments have the widths they would have had from the start. A state of the optimizer as it was before is loaded
        by way of `convert_optimizer_state`.
        """
        super().add_param_group(param_group)  # type: ignore[misc]
        group = self.param_groups[-1]
        group.setdefault("kind", self.kind)
        if "state_bits" not in group:
            names = group.get("param_names", [""] * len(group["params"]))
            group["state_bits"] = [self._bits(*each) for each in zip(names, group["params"], strict=True)]

    def load_state_dict(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As torch's; raises OptimizerError for a state of another kind, of other parameters or other widths."""
        check(state_dict, KINDS[self.kind], self.param_groups)
        own = [{key: group[key] for key in ("kind", "state_bits", "param_names")} for group in self.param_groups]
        super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]
        for group, kept in zip(self.param_groups, own, strict=True):
            group.update(kept)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "in_full": self.in_full}  # type: ignore[misc]

    def _bits(self, name: str, parameter: nn.Parameter) -> int:
        full = {id(parameter)} if any(is_same_parameter(name, each) for each in self.in_full) else set()
        return state_bits(parameter, full) if KINDS[self.kind].bits == 8 else 32
