"""From the state of one optimizer to that of another: other types, other groups, the same moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rewrite.errors import OptimizerError
from rewrite.optim.kinds import KINDS, Kind
from rewrite.optim.state import CheckedState, described, entries, kinds_of

BLOCK = 256
"""Elements that share one scale, in the kernels of bitsandbytes."""

_CARRIED = ("lr", "initial_lr", "betas", "eps", "momentum")
"""Options that go over from the groups of the state, as they do when a state is loaded."""


def convert_optimizer_state(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, model: nn.Module | None = None
) -> dict[str, Any]:
    """`state`, of another kind or with other groups, as `optimizer` loads it; neither is changed.

    state: a state dict of torch's Adam, AdamW or SGD, or of those of bitsandbytes, made by `rewrite.optimizer` or not.
    optimizer: what `rewrite.optimizer` returned.
    model: tells the order of the parameters of a state that names none and has other groups, such as that of
    `torch.optim.AdamW(model.parameters())`: the order of `model.parameters()`, all of them or what trains.

    Moments go between 32 and 8 bits by the block-wise quantization of bitsandbytes: 32 to 32 is exact, into 8 they are
    rounded as one step of the 8-bit optimizer rounds them. Learning rate, betas, eps and momentum come from the state,
    weight decay from the optimizer. Raises OptimizerError for a state of another family, of fewer or other parameters.
    """
    if not isinstance(optimizer, CheckedState):
        raise OptimizerError(
            "optimizer", f"{type(optimizer).__name__} was not made by rewrite.optimizer", "make it with that"
        )
    target = KINDS[optimizer.kind]
    source = _same_family(state, target)
    held = entries(state)
    converted: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    places = _places(state, optimizer, model)
    for group, saved in _groups(state, optimizer):
        made = {**group, **_carried(saved, group, target), "params": []}
        for position, parameter in enumerate(group["params"]):
            number = sum(len(done["params"]) for done in groups) + position
            made["params"].append(number)
            entry = held.get(next(places), {})
            moments = _moments(entry, source, parameter) if entry else None
            if moments is not None:
                step = int(entry.get("step", 1))
                converted[number] = _as_kind(target, moments, step, group["state_bits"][position])
        groups.append(made)
    return {"state": converted, "param_groups": groups}


def _same_family(state: Mapping[str, Any], target: Kind) -> Kind:
    kinds = [kind for kind in kinds_of(state) if kind.family == target.family]
    if not kinds:
        raise OptimizerError(
            "optimizer state",
            f"it is of {described(state)}, whose moments mean nothing to {target.name} ({target.layout})",
            "start that optimizer anew",
        )
    return kinds[0]


def _groups(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Each group of the optimizer with that of the state whose options it takes over."""
    saved = state["param_groups"]
    for place, group in enumerate(optimizer.param_groups):
        yield group, saved[place] if len(saved) == len(optimizer.param_groups) else saved[0]


def _carried(saved: Mapping[str, Any], group: Mapping[str, Any], target: Kind) -> dict[str, Any]:
    """The options that go over. Raises OptimizerError for one that changes what a step is and that the target lacks."""
    for key in ("nesterov", "dampening", "amsgrad", "maximize"):
        if saved.get(key) and key not in group:
            raise OptimizerError(
                "optimizer state", f"it was made with {key}={saved[key]}, which {target.name} lacks", "start anew"
            )
    carried = {key: saved[key] for key in _CARRIED if key in saved and (key in group or key == "initial_lr")}
    if target.name == "sgd8bit" and "momentum" in saved:
        carried["betas"] = (saved["momentum"], 0.0)  # bitsandbytes keeps the momentum there
    if target.name == "sgd" and "betas" in saved:
        carried["momentum"] = saved["betas"][0]
    return carried


def _places(state: Mapping[str, Any], optimizer: torch.optim.Optimizer, model: nn.Module | None) -> Iterator[Any]:
    """The number in the state of each parameter of the optimizer, in order."""
    saved = state["param_groups"]
    numbers = [number for group in saved for number in group["params"]]
    ours = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all("param_names" in group for group in saved):
        named = dict(zip((name for group in saved for name in group["param_names"]), numbers, strict=True))
        yield from (_by_name(name, named) for group in optimizer.param_groups for name in group["param_names"])
        return
    if [len(group["params"]) for group in saved] == [len(group["params"]) for group in optimizer.param_groups]:
        yield from numbers
        return
    if model is None or len(saved) > 1:
        raise OptimizerError(
            "optimizer state",
            f"it names no parameters, and its {len(saved)} groups are not the optimizer's",
            "give `model`, for a state with one group; else save it from an optimizer over model.named_parameters()",
        )
    every = list(model.parameters())
    order = every if len(numbers) == len(every) else [parameter for parameter in every if parameter.requires_grad]
    if len(numbers) != len(order):
        raise OptimizerError(
            "optimizer state",
            f"it is of {len(numbers)} parameters; the model has {len(every)}, of which {len(order)} train",
            "freeze what was frozen when the state was saved",
        )
    found = {id(parameter): number for parameter, number in zip(order, numbers, strict=True)}
    yield from (found[id(parameter)] for parameter in ours)


def _by_name(name: str, named: Mapping[str, Any]) -> Any:
    if name in named:
        return named[name]
    alike = [other for other in named if other.endswith(f".{name}") or name.endswith(f".{other}")]
    if len(alike) == 1:
        return named[alike[0]]
    raise OptimizerError(
        "optimizer state", f"it holds no parameter {name!r}", "freeze what was frozen when the state was saved"
    )


def _moments(entry: Mapping[str, Any], source: Kind, parameter: nn.Parameter) -> list[torch.Tensor] | None:
    """The moments in float32, of the parameter's shape; None before the first step."""
    found = [entry.get(key) for key in source.keys]
    if any(moment is None for moment in found):
        return None
    moments = []
    for place, moment in enumerate(found, start=1):
        assert moment is not None
        if moment.shape != parameter.shape:
            raise OptimizerError(
                "optimizer state",
                f"it holds a moment of shape {tuple(moment.shape)} for a parameter of {tuple(parameter.shape)}",
                "give the state of this model's optimizer",
            )
        moment = moment.to(parameter.device)
        if moment.dtype == torch.uint8:
            absmax, code = entry[f"absmax{place}"].to(moment.device), entry[f"qmap{place}"].to(moment.device)
            moment = _kernels().dequantize_blockwise(moment, absmax, code, BLOCK, torch.float32)
        moments.append(moment.float())
    return moments


def _as_kind(target: Kind, moments: list[torch.Tensor], step: int, bits: int) -> dict[str, Any]:
    if target.library == "torch":
        counted = {"step": torch.tensor(float(step))} if target.family == "adam" else {}
        return {**counted, **{key: moment.clone() for key, moment in zip(target.keys, moments, strict=True)}}
    made: dict[str, Any] = {"step": step}
    for place, (key, moment) in enumerate(zip(target.keys, moments, strict=True), start=1):
        if bits == 32:
            made[key] = moment.clone()
            continue
        code = _code(signed=place == 1).to(moment.device)
        made[key], made[f"absmax{place}"] = _kernels().quantize_blockwise(moment, code, BLOCK)
        made[f"qmap{place}"] = code
    return made


def _kernels() -> Any:
    import bitsandbytes  # noqa: F401 - defines the operators

    return torch.ops.bitsandbytes


def _code(*, signed: bool) -> torch.Tensor:
    from bitsandbytes.functional import create_dynamic_map

    code: torch.Tensor = create_dynamic_map(signed=signed)
    return code
