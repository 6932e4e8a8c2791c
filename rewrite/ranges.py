"""Which values of a real forward come near the largest number of a low precision, or beyond it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from rewrite.emit.rewriting import Rewriting
from rewrite.emit.tree import copy_tree
from rewrite.errors import InputError
from rewrite.observation import copied, observe_outputs
from rewrite.operators import operator_name, operator_path
from rewrite.program import Program, Region, value_tensors
from rewrite.value_range import Ranges as Ranges
from rewrite.value_range import State, ValueRange
from rewrite.verify import require_numbers

NAMES = {"fp16": "float16", "bf16": "bfloat16"}


def ranges(
    model: nn.Module, example_inputs: Any, dtype: str | torch.dtype = "fp16", *, share: float = 0.25, seed: int = 0
) -> Ranges:
    """The largest magnitude of every value that `model` computes on `example_inputs`, held against `dtype`'s largest.

    One real forward of the captured graph as it is, in the mode and precision that `model` is in; parameters are looked
    at too. A value is near overflow above `share` of the largest number of `dtype` ("fp16", "bf16" or a torch dtype).
    `.near` lists those, `.values` all. Infinities below zero and the least number of a value's own dtype, which masks
    are made of, do not count. What an opaque module computes inside is not seen. `model` is left as it was.

    Raises InputError for a dtype that is none, or inputs that the model cannot run; VerifyError for a model on the meta
    device; CaptureError.
    """
    low = _dtype(dtype)
    require_numbers(model)
    rewriting = Rewriting(copy_tree(model), (), {})
    args, kwargs = copied(rewriting.call(example_inputs))
    with torch.enable_grad():
        program = rewriting.program("", rewriting.capture("", args, kwargs))
    recorder = _Recorder(low, share)
    rewriting.emit(_recording(program, recorder))
    try:
        observe_outputs(rewriting.root, args, kwargs, seed=seed)
    except Exception as error:  # the model's own, whatever it is
        cause = f"it raises on the example inputs: {type(error).__name__}: {error}"
        raise InputError(f"ranges {type(model).__name__}", cause, "pass inputs that it accepts") from error
    for name, parameter in model.named_parameters():
        recorder.record(ValueRange(name, "parameter"), parameter)
    unseen = tuple(entry.path for entry in program.opaque)
    name = str(low).removeprefix("torch.")
    return Ranges(name, torch.finfo(low).max, share, tuple(recorder.found.values()), unseen)


def _dtype(given: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, NAMES.get(given, given), None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InputError(f"dtype {given}", "is no floating-point dtype", "give fp16 or bf16")
    return found


class _Recorder:
    """The largest magnitudes met, by path."""

    def __init__(self, low: torch.dtype, share: float) -> None:
        self.low = low
        self.limit = share * torch.finfo(low).max
        self.found: dict[str, ValueRange] = {}

    def record(self, place: ValueRange, value: Any) -> None:
        with torch.no_grad():
            for tensor in value_tensors(value):
                if tensor.is_floating_point() and tensor.numel():
                    self._keep(place, *_magnitude(tensor.detach()))

    def _keep(self, place: ValueRange, largest: float, finite: bool) -> None:
        seen = self.found.get(place.path)
        finite = finite and (seen is None or seen.state != "not finite")
        if seen is None or largest > seen.largest or not finite:
            self.found[place.path] = replace(place, largest=largest, state=self._state(largest, finite))

    def _state(self, largest: float, finite: bool) -> State:
        if not finite:
            return "not finite"
        if math.isinf(torch.tensor(largest, dtype=torch.float64).to(self.low).item()):
            return "overflow"
        return "near" if largest > self.limit else ""


def _magnitude(tensor: torch.Tensor) -> tuple[float, bool]:
    """The largest finite magnitude that no mask put there, and whether all others are finite or a mask's."""
    least = torch.finfo(tensor.dtype).min
    low, high = (float(each) for each in torch.aminmax(tensor))
    if least < low and math.isfinite(high):
        return max(abs(low), abs(high)), True
    real = tensor[(tensor > least) & (tensor < math.inf)]
    finite = not bool((tensor.isnan() | (tensor == math.inf)).any())
    return (float(real.abs().max()) if real.numel() else 0.0), finite


def _recording(program: Program, recorder: _Recorder) -> Program:
    """`program` with a graph for each instance, which tells the recorder what it computes."""
    program = program.copy()
    for region in program.regions:
        for instance in region.instances:
            program, part = program.split(program.left_of(region), (instance,))
            last = [node for node in part.nodes() if node.op == "placeholder"][-1:]
            for node in list(part.nodes()):
                if _gives_new_numbers(node, instance):
                    with part.graph.inserting_after(last[0] if node.op == "placeholder" else node):
                        part.graph.call_function(_Tell(recorder, _place(part, node, instance)), (node,))
    return program


class _Tell:
    """A call in a graph that hands a value to a recorder."""

    __module__ = "rewrite.ranges"

    def __init__(self, recorder: _Recorder, place: ValueRange) -> None:
        self.recorder, self.place = recorder, place
        self.__name__ = self.__qualname__ = "record"

    def __call__(self, value: Any) -> None:
        self.recorder.record(self.place, value)


def _place(region: Region, node: fx.Node, instance: str) -> ValueRange:
    source = str(node.meta.get("source", ""))
    if node.op == "placeholder":
        return ValueRange(str(node.target), "input", source)
    return ValueRange(operator_path(region, node, instance), operator_name(region, node), source)


def _gives_new_numbers(node: fx.Node, instance: str) -> bool:
    """Whether a node gives floating-point numbers that none before it gave: no view, no results of a block."""
    if not any(each.is_floating_point() for each in value_tensors(node.meta.get("val"))):
        return False
    if node.op == "placeholder":
        return instance == ""
    if not node.op.startswith("call") or node.meta.get("block"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    written = name.endswith("_") or name == "setitem"
    return written or not set(_storages(node.all_input_nodes)).issuperset(_storages([node]))


def _storages(nodes: Iterable[fx.Node]) -> Iterator[int]:
    for node in nodes:
        tensors = (each for each in value_tensors(node.meta.get("val")) if each.layout == torch.strided)
        yield from (each.untyped_storage()._cdata for each in tensors)
