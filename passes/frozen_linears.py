"""Finds the Linear layers whose weights are frozen, and puts quantized ones in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn
from transformers.pytorch_utils import Conv1D

from passes.quantized_linear import CLASSES, Linear4bit, Linear8bitLt
from rewrite import Preparation, Refusal, SelectorError, matches

Quantized = Linear8bitLt | Linear4bit

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def replace_frozen(model: nn.Module, bits: int, selectors: Sequence[str]) -> Preparation:
    """Replace the layers that `selectors` name, or all, where nothing is in the way. The model is changed."""
    layers = {path: module for path, module in model.named_modules() if type(module) is nn.Linear}
    chosen = {path: layer for path, layer in layers.items() if not selectors or _selected(path, selectors)}
    for selector in selectors:
        if not any(matches(selector, path) for path in layers):
            raise SelectorError(
                f"quantize-frozen{{select={selector}}}",
                "it matches no Linear layer of the model",
                f"name layers, or modules above them, such as {next(iter(layers), 'encoder.layer.0')!r}",
            )
    obstacles = dict(_obstacles(model, chosen, explicit=bool(selectors)))
    replaced = {path: layer for path, layer in chosen.items() if path not in obstacles and _is_frozen(layer)}
    made = {id(layer): CLASSES[bits].of(layer) for layer in replaced.values()}
    _exchange(model, made)
    back = {id(new): old for old, new in ((layer, made[id(layer)]) for layer in replaced.values())}
    reasons = {**obstacles, **dict(_other_layers(model, selectors))}
    refusals = tuple(Refusal(path, reason) for path, reason in reasons.items())
    return Preparation(tuple(replaced), refusals, lambda: _exchange(model, back))


def bytes_now(layer: nn.Module) -> int:
    """Of a quantized layer's weight and scales, and its bias."""
    return sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))


def bytes_before(layer: nn.Module) -> int:
    """Of the layer in whose place it stands."""
    assert isinstance(layer, (Linear8bitLt, Linear4bit))
    bias = 0 if layer.bias is None else layer.bias.nbytes
    return layer.in_features * layer.out_features * layer.stored_from.itemsize + bias


def _exchange(model: nn.Module, instead: Mapping[int, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in instead:
                parent._modules[name] = instead[id(child)]


def _is_frozen(layer: nn.Linear) -> bool:
    return not layer.weight.requires_grad


def _selected(path: str, selectors: Sequence[str]) -> bool:
    return any(matches(selector, path) for selector in selectors)


def _obstacles(model: nn.Module, chosen: dict[str, nn.Linear], *, explicit: bool) -> Iterator[tuple[str, str]]:
    """(path, reason) of the layers that stay as they are; those that train only where they were named."""
    holders = _holders(model)
    kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    kept += tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for path, layer in chosen.items():
        reason = _obstacle(model, path, layer, holders, kept)
        if _is_frozen(layer) and reason:
            yield path, reason
        elif explicit and not _is_frozen(layer):
            yield path, "its weight trains, and a weight in low precision cannot: freeze it, or leave it out of select"


def _obstacle(model: nn.Module, path: str, layer: nn.Linear, holders: dict[int, list[str]], kept: Sequence[str]) -> str:
    others = [holder for holder in holders.get(id(layer.weight), []) if holder != path]
    if not path:
        return "it is the whole model, in whose place no other can stand"
    if others:
        return f"its weight is that of {others[0]} too"
    if "weight" not in layer._parameters:
        return "its weight is made anew at each call (weight_norm, spectral_norm or pruning, by a hook)"
    if not layer.weight.is_floating_point():
        return f"its weight is {layer.weight.dtype}, not floating point"
    reader = _reader(model, path)
    if reader:
        return f"{reader} reads its weight itself"
    if any(part in path.split(".") or path.endswith(part) for part in kept):
        return "the model's author keeps it in float32 (_keep_in_fp32_modules)"
    return ""


def _other_layers(model: nn.Module, selectors: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(path, reason) of the first frozen layer of each class that multiplies by a matrix and is no plain Linear."""
    found: dict[str, list[str]] = {}
    for path, layer in model.named_modules():
        other = isinstance(layer, (nn.Linear, Conv1D)) and type(layer) is not nn.Linear
        if other and _has_frozen_matrix(layer) and (not selectors or _selected(path, selectors)):
            found.setdefault(type(layer).__name__, []).append(path)
    for kind, paths in found.items():
        more = f", as are {len(paths) - 1} more frozen layers" if len(paths) > 1 else ""
        yield paths[0], f"it is a {kind}{more}: only torch.nn.Linear is stored in few bits"


def _has_frozen_matrix(layer: nn.Module) -> bool:
    """Whether nothing trains in `layer`, and it is not stored in few bits already."""
    weights = list(layer.parameters())
    return bool(weights) and not any(weight.requires_grad or not weight.is_floating_point() for weight in weights)


def _holders(model: nn.Module) -> dict[int, list[str]]:
    """Paths of the modules that hold each parameter, a module that stands in two places once."""
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), []).append(path)
    return found


def _reader(model: nn.Module, path: str) -> str:
    """A layer of torch around the one at `path`: those (attention, Transformer layers) read the weights of theirs."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        around = model.get_submodule(".".join(parts[:length]))
        if type(around).__module__.startswith("torch.nn.") and not isinstance(around, CONTAINERS):
            return ".".join(parts[:length])
    return ""
