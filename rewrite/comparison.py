"""Comparison of two modules and of two observed steps, value by value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from rewrite.certificate import Kind, Row
from rewrite.observation import Observation
from rewrite.tolerance import Tolerance, magnitude


class Bound(Protocol):
    """What says how far a value may be off."""

    def bound(self, value: torch.Tensor, largest: float) -> float:
        """The largest difference allowed from `value`; `largest` is the largest magnitude of its kind in the step."""


def compare(expected: Observation, found: Observation, tolerance: Tolerance, case: str) -> Iterator[Row]:
    """One row for each value of a step."""
    yield from compare_tensors("loss", {"loss": expected.loss}, {"loss": found.loss}, tolerance, case)
    outputs = {name: value for name, value in expected.outputs.items() if name not in found.dropped}
    yield from compare_tensors("output", outputs, found.outputs, tolerance, case)
    for name in sorted(found.dropped):
        yield Row(name, "output", True, case=case, note="left out, as the pass was told")
    yield from compare_tensors("gradient", expected.gradients, found.gradients, tolerance, case)
    yield from compare_tensors("buffer", expected.buffers, found.buffers, tolerance, case)
    for name, state in expected.streams.items():
        equal = _same_state(state, found.streams.get(name))
        yield Row(name, "rng", equal, case=case, note="" if equal else "the random stream moved by another amount")
    for path, count in expected.hook_calls.items():
        other = found.hook_calls.get(path, 0)
        note = "" if other == count else f"called {other} times, not {count}"
        yield Row(path, "hook", other == count, case=case, note=note)


def structure(original: nn.Module, rewritten: nn.Module, replaced: Collection[str] = ()) -> Iterator[Row]:
    """State dict keys, the identity of parameters, and ties, but for what is in `replaced` modules."""
    if replaced:
        note = f"{len(replaced)} modules hold other weights; compared with a model that has these"
        yield Row("weights", "structure", True, note=note)

    def kept(name: str) -> bool:
        return not any(name.startswith(f"{path}.") for path in replaced)

    keys, other_keys = list(filter(kept, original.state_dict())), list(filter(kept, rewritten.state_dict()))
    note = "" if keys == other_keys else _listed("keys or their order differ", set(keys) ^ set(other_keys))
    yield Row("state_dict keys", "structure", keys == other_keys, note=note)
    theirs, ours = (
        {name: parameter for name, parameter in module.named_parameters(remove_duplicate=False) if kept(name)}
        for module in (rewritten, original)
    )
    ties = _ties(ours) == _ties(theirs)
    yield Row("tied parameters", "structure", ties, note="" if ties else "other names share a parameter")
    apart = [name for name, parameter in ours.items() if theirs.get(name) is not parameter]
    if not ours or len(apart) < len(ours):
        note = _listed("not the original's objects", apart) if apart else ""
        yield Row("parameters", "identity", not apart, note=note)
        return
    for name, parameter in ours.items():
        if (other := theirs.get(name)) is not None:
            rounded = parameter.to(other.dtype) if other.is_floating_point() else parameter
            note = "" if other.dtype == parameter.dtype else f"held in {str(other.dtype).removeprefix('torch.')}"
            row = _row(name, "identity", rounded, other, 0.0, "")
            yield replace(row, note=row.note or note)


def _ties(parameters: Mapping[str, nn.Parameter]) -> set[tuple[str, ...]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(id(parameter), []).append(name)
    return {tuple(names) for names in groups.values()}


def _listed(text: str, names: Iterable[str]) -> str:
    shown = sorted(names)
    return f"{text}: {', '.join(shown[:3])}" + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def compare_tensors(
    kind: Kind,
    expected: Mapping[str, torch.Tensor | None],
    found: Mapping[str, torch.Tensor | None],
    tolerance: Bound,
    case: str,
) -> Iterator[Row]:
    """One row for each value that either side has."""
    largest = max((magnitude(value) for value in expected.values() if value is not None), default=0.0)
    for name in [*expected, *(name for name in found if name not in expected)]:
        ours, theirs = expected.get(name), found.get(name)
        if ours is None and theirs is None:
            continue
        if ours is None or theirs is None:
            note = "missing" if theirs is None else "only the rewritten module has one"
            yield Row(name, kind, False, float("inf"), float("inf"), case=case, note=note)
            continue
        yield _row(name, kind, ours, theirs, tolerance.bound(ours, largest), case)


def _row(name: str, kind: Kind, ours: torch.Tensor, theirs: torch.Tensor, bound: float, case: str) -> Row:
    if ours.shape != theirs.shape or (bound == 0.0 and ours.dtype != theirs.dtype):
        note = f"{ours.dtype} {tuple(ours.shape)} became {theirs.dtype} {tuple(theirs.shape)}"
        return Row(name, kind, False, float("inf"), float("inf"), bound, case, note)
    both_nan = (ours != ours) & (theirs != theirs)
    if ours.dtype == theirs.dtype and bool(((ours == theirs) | both_nan).all()):
        return Row(name, kind, True, tolerance=bound, case=case)
    gap = (ours.detach().double() - theirs.detach().double()).abs().masked_fill(both_nan, 0.0)
    gap = gap.masked_fill(ours == theirs, 0.0)
    largest = float(gap.nan_to_num(float("inf"), float("inf")).max())
    scale = magnitude(ours)
    return Row(name, kind, False, largest, largest / scale if scale else float("inf"), bound, case)


def _same_state(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return isinstance(theirs, torch.Tensor) and torch.equal(ours, theirs)
    return repr(_plain(ours)) == repr(_plain(theirs))


def _plain(state: Any) -> Any:
    return [item.tolist() if hasattr(item, "tolist") else item for item in state] if state is not None else None
