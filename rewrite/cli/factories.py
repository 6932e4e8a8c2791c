"""`package.module:factory` and `file.py:factory`: models made by the user's own code."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from rewrite.errors import InputError, ModelError

NO_INPUTS = object()
"""Stands for the example inputs of a factory that returns a module only."""


def call_factory(name: str, options: Mapping[str, Any], sizes: Mapping[str, int | None]) -> tuple[nn.Module, Any]:
    """Run the factory called `name`; return its module and example inputs, or `NO_INPUTS`.

    `options` (`--set`) are keyword arguments of the factory; `sizes` (`batch`, `seq`) are passed where the factory
    takes them, and refused where they were asked for and it does not. Raises `ModelError`, `InputError`.
    """
    factory = _find_factory(name)
    arguments = _factory_arguments(name, factory, options, sizes)
    try:
        made = factory(**arguments)
    except (Exception, SystemExit) as error:  # a factory may raise anything
        cause = f"raised {type(error).__name__}: {' '.join(str(error).split())} at {last_frame(error)}"
        raise ModelError(name, cause, "make the factory run on its own first") from error
    if isinstance(made, nn.Module):
        return made, NO_INPUTS
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        refuse_unused_sizes(name, sizes, arguments)
        return made
    raise ModelError(
        name,
        f"returned {type(made).__name__}, not a torch.nn.Module",
        "return a module, or a tuple of module and example inputs",
    )


def _find_factory(name: str) -> Callable[..., Any]:
    location, _, attribute = name.rpartition(":")
    module = _load_file(name, Path(location)) if location.endswith(".py") else _load_module(name, location)
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, [key for key in vars(module) if not key.startswith("_")], n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"define {attribute} there"
            raise ModelError(name, f"{location} has no {attribute}", hint)
        found = getattr(found, part)
    if isinstance(found, nn.Module):
        return lambda: found
    if not callable(found):
        raise ModelError(name, f"{attribute} is a {type(found).__name__}, not a function", "name a function or a class")
    return found


def _load_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ModelError(name, f"there is no file {path}", "check the path; it is relative to the current directory")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ModelError(name, f"{path} is not a Python file", "give a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # pickling and dataclasses look a class up by its module
    sys.path.insert(0, str(path.parent.resolve()))
    return _running(name, str(path), lambda: spec.loader.exec_module(module) or module)  # type: ignore[union-attr]


def _load_module(name: str, location: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        present = importlib.util.find_spec(location) is not None
    except (ImportError, ValueError):
        present = False
    if not present:
        raise ModelError(name, f"there is no module {location}", "check its name, or give file.py:factory")
    return _running(name, location, lambda: importlib.import_module(location))


def _running(name: str, location: str, load: Callable[[], ModuleType]) -> ModuleType:
    try:
        return load()
    except (Exception, SystemExit) as error:  # user code may raise anything at import
        cause = f"importing {location} raised {type(error).__name__}: {' '.join(str(error).split())}"
        raise ModelError(name, f"{cause} at {last_frame(error)}", "make it import on its own first") from error


def _factory_arguments(
    name: str, factory: Callable[..., Any], options: Mapping[str, Any], sizes: Mapping[str, int | None]
) -> dict[str, Any]:
    try:
        parameters = dict(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # a builtin may have no signature
        parameters = {}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in options:
        if key in parameters or takes_any:
            continue
        close = difflib.get_close_matches(key, parameters, n=3, cutoff=0.5)
        taken = f"it takes {', '.join(parameters)}" if parameters else "it takes no arguments"
        hint = f"did you mean {' or '.join(close)}?" if close else taken
        raise InputError(f"--set {key}", f"is no argument of {name}", hint)
    used = {key: size for key, size in sizes.items() if size is not None and key in parameters}
    return {**options, **used}


def refuse_unused_sizes(name: str, sizes: Mapping[str, int | None], arguments: Mapping[str, Any]) -> None:
    """Raise `InputError` where a size was asked for and the factory, which makes the inputs, does not take it."""
    for key, size in sizes.items():
        if size is not None and key not in arguments:
            raise InputError(
                f"--{key} {size}", f"{name} makes its own inputs and takes no {key}", f"give it an argument {key}"
            )


def last_frame(error: BaseException) -> str:
    """Where in the user's code `error` was raised, as `file.py:12`."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    frame = outside[-1] if outside else frames[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"
