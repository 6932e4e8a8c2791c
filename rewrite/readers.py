"""Read the leaves of a call whose skeleton is known, without taking the call apart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from rewrite.calls import Same

Reader = Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]


def leaf_reader(skeleton: Any, wanted: Collection[int]) -> Reader | None:
    """A function from `(args, kwargs)` to the leaves `split` would give, None in place of those not `wanted`.

    `skeleton` is that of `(args, kwargs)`. Returns None when a leaf cannot be reached by keys and attributes.
    """
    try:
        args, kwargs = skeleton[1:]
        paths = [*_paths(args, "args"), *_paths(kwargs, "kwargs")]
    except LookupError:
        return None
    listed = ", ".join(path if place in wanted else "None" for place, path in enumerate(paths))
    reader: Reader = eval(f"lambda args, kwargs: [{listed}]", {})
    return reader


def _paths(skeleton: Any, path: str) -> Iterator[str]:
    kind = skeleton[0]
    if kind in ("tensor", "int", "held", "object"):
        yield path
    if kind in (tuple, list, torch.Size):
        yield from _items(enumerate(skeleton[1:]), path)
    elif kind is dict:
        yield from _items(skeleton[1:], path)
    elif kind == "tuple":
        yield from _items(enumerate(skeleton[2:]), path)
    elif kind in ("output", "mapping"):
        yield from _items(skeleton[2:], path)
    elif kind == "slice":
        yield from _attributes(zip(("start", "stop", "step"), skeleton[1:], strict=True), path)
    elif kind in ("record", "object"):
        yield from _attributes(skeleton[2:], path)
    elif kind == "list":
        yield from _attributes(skeleton[2], path)
        yield from _items(enumerate(skeleton[3:]), path)
    elif kind == "dict":
        yield from _attributes(skeleton[2], path)
        yield from _items(skeleton[4], path)


def _items(items: Any, path: str) -> Iterator[str]:
    for key, item in items:
        if isinstance(key, Same):
            if next(_paths(item, ""), None) is not None:
                raise LookupError(key)
            continue
        yield from _paths(item, f"{path}[{key!r}]")


def _attributes(attributes: Any, path: str) -> Iterator[str]:
    for name, item in attributes:
        yield from _paths(item, f"{path}.{name}")
