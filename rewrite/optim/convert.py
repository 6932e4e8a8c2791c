"""From the state of one optimizer to that of another: other types, other groups, the same moments."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rewrite.errors import OptimizerError
from rewrite.optim.kinds import KINDS, Kind
from rewrite.optim.state import CheckedState, described, entries, is_same_parameter, kinds_of

BLOCK = 256
"""Elements that share one scale, in the kernels of bitsandbytes."""

_OF_THE_STEP = ("maximize", "amsgrad", "nesterov", "dampening")
"""Options that change what a step is, and that not every optimizer has."""
_CARRIED = ("lr", "initial_lr", "betas", "eps", "momentum", *_OF_THE_STEP)
"""Options that go over from the groups of the state, as they do when a state is loaded."""

log = logging.getLogger("rewrite")


def convert_optimizer_state(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer, model: nn.Module | None = None
) -> dict[str, Any]:
    """`state`, of another kind or with other groups, as `optimizer` loads it; neither is changed.

    state: a state dict of torch's Adam, AdamW or SGD, or of those of bitsandbytes, made by `rewrite.optimizer` or not.
    optimizer: what `rewrite.optimizer` returned.
    model: tells the order of the parameters of a state that names none and has other groups, such as that of
    `torch.optim.AdamW(model.parameters())`: the order of `model.parameters()`, all of them or what trains.

    Moments go between 32 and 8 bits by the block-wise quantization of bitsandbytes: equal widths are exact, into 8 they
    are rounded as one step of the 8-bit optimizer rounds them. Weight decay is the optimizer's, all other options come
    from the state. A parameter that a state with names does not hold, because it was frozen then, starts without
    moments, and the logger "rewrite" tells of it. Raises OptimizerError for a state of another family or of other
    parameters, and where an option cannot go over: one that the optimizer lacks, or has one of for parameters that had
    several.
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
    for group in optimizer.param_groups:
        theirs = [next(places) for _ in group["params"]]
        carried = _carried(_options(state, theirs), group, target)
        first = sum(len(done["params"]) for done in groups)
        groups.append({**group, **carried, "params": list(range(first, first + len(theirs)))})
        for number, place, parameter, bits in zip(
            groups[-1]["params"], theirs, group["params"], group["state_bits"], strict=True
        ):
            entry = held.get(place, {})
            moments = _moments(entry, source, parameter) if entry else None
            if moments is not None and _is_stored_so(entry, target, bits):
                converted[number] = {
                    key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in entry.items()
                }
            elif moments is not None:
                converted[number] = _as_kind(target, moments, int(entry.get("step", 1)), bits)
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


def _options(state: Mapping[str, Any], numbers: Sequence[Any]) -> dict[str, Any]:
    """The options that the parameters of these numbers have in the state. Raises OptimizerError where they differ."""
    saved = [group for group in state["param_groups"] if not set(group["params"]).isdisjoint(numbers)]
    for key in _CARRIED:
        values = [group[key] for group in saved if key in group]
        other = next((value for value in values if value != values[0]), None)
        if other is not None:
            raise OptimizerError(
                "optimizer state",
                f"{key} is {values[0]} for some of its parameters and {other} for others, and this optimizer has one "
                f"group for them",
                f"give the groups of the state (state['param_groups']) one {key}, or start anew",
            )
    return {key: value for group in saved for key, value in group.items() if key in _CARRIED}


def _carried(saved: Mapping[str, Any], group: Mapping[str, Any], target: Kind) -> dict[str, Any]:
    """The options that go over. Raises OptimizerError for one that changes what a step is and that the target lacks."""
    for key in _OF_THE_STEP:
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
    """The number in the state of each parameter of the optimizer, in order; None for one that it does not hold."""
    saved = state["param_groups"]
    numbers = [number for group in saved for number in group["params"]]
    ours = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all("param_names" in group for group in saved):
        named = dict(zip((name for group in saved for name in group["param_names"]), numbers, strict=True))
        yield from _by_names([name for group in optimizer.param_groups for name in group["param_names"]], named)
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


def _by_names(names: Sequence[str], named: Mapping[str, Any]) -> list[Any]:
    """For each name, what `named` has for it, under another prefix if need be, or None."""
    found = [_by_name(name, named) for name in names]
    new = [name for name, number in zip(names, found, strict=True) if number is None]
    if len(new) == len(names):
        raise OptimizerError(
            "optimizer state",
            f"it holds none of this optimizer's parameters: {next(iter(named), 'nothing')!r}, and not {names[0]!r}",
            "give the state of an optimizer over this model",
        )
    if new:
        log.warning("optimizer state: %d parameters that it does not hold start anew, %s first", len(new), new[0])
    return found


def _by_name(name: str, named: Mapping[str, Any]) -> Any:
    if name in named:
        return named[name]
    alike = [other for other in named if is_same_parameter(name, other)]
    return named[alike[0]] if len(alike) == 1 else None


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


def _is_stored_so(entry: Mapping[str, Any], target: Kind, bits: int) -> bool:
    """Whether the moments are stored as the target stores them, so that nothing is to be rounded."""
    found = [entry.get(key) for key in target.keys]
    return all(moment is not None and (moment.dtype == torch.uint8) == (bits == 8) for moment in found)


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
