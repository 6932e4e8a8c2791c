"""Example inputs: one call of a model, in any of the forms users have it in."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from rewrite.errors import InputError


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example inputs as positional and keyword arguments. Raises InputError for what cannot be a call."""
    values = example_inputs.values() if isinstance(example_inputs, Mapping) else example_inputs
    if isinstance(values, Iterator) or any(isinstance(value, Iterator) for value in _several(values)):
        raise InputError("example inputs", "an iterator would be used up", "give a list or a tensor in its place")
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        if not all(isinstance(key, str) for key in example_inputs):
            raise InputError("example inputs", "a dict of inputs has names as keys", "give keyword arguments by name")
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise InputError(
        "example inputs",
        f"{type(example_inputs).__name__} is neither a dict, a tuple, a list nor a tensor",
        "give a dict of keyword arguments or a tuple of positional ones",
    )


def in_order(kwargs: dict[str, Any], signature: inspect.Signature) -> dict[str, Any]:
    """Keyword arguments in the order of the signature, those it does not name last: one call, however it is written."""
    if len(kwargs) < 2:
        return kwargs
    return {**{name: kwargs[name] for name in signature.parameters if name in kwargs}, **kwargs}


def _several(values: Any) -> Iterable[Any]:
    return () if isinstance(values, torch.Tensor) or not isinstance(values, Iterable) else values
