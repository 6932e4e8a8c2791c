"""MODEL on the command line: an architecture's name, a directory, a hub id, or a factory in the user's code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rewrite.cli.overrides import parse_overrides
from rewrite.errors import InputError, ModelError


@dataclass(frozen=True)
class Loaded:
    """A model in train mode and the batch of one training step."""

    name: str
    model: nn.Module
    example_inputs: Any
    description: str
    """One line: the class, the task and the sizes."""
    notes: tuple[str, ...] = ()
    """What was chosen for the user, one sentence each."""
    from_config: bool = False
    """Whether the inputs were made from the model's configuration."""
    seq: int | None = None
    """Length of the sequences, where the model has any and it is known."""


@dataclass(frozen=True)
class Request:
    """What the command line says about the model and its batch."""

    model: str
    task: str | None = None
    batch: int | None = None
    seq: int | None = None
    settings: Sequence[str] = ()


def load(request: Request, device: torch.device) -> Loaded:
    """Build the model and its training batch; an architecture or a stored configuration goes to `device`.

    Raises `ModelError` for a model that is not found or not built, `InputError` for sizes or settings that do not fit.
    """
    for name, size in (("batch", request.batch), ("seq", request.seq)):
        if size is not None and size < 1:
            raise InputError(f"--{name} {size}", "is not a positive number", f"give --{name} 1 or more")
    location, colon, attribute = request.model.rpartition(":")
    if colon and location and attribute:
        return _load_factory(request)
    return _load_config(request, device)


def _load_factory(request: Request) -> Loaded:
    from rewrite.cli.factories import NO_INPUTS, call_factory

    if request.task is not None:
        cause = f"{request.model} decides its own task"
        raise InputError(f"--task {request.task}", cause, "leave --task out, or use an architecture")
    sizes = {"batch": request.batch, "seq": request.seq}
    model, example_inputs = call_factory(request.model, parse_overrides(request.settings), sizes)
    model.train()
    notes: tuple[str, ...] = ()
    if example_inputs is NO_INPUTS:
        example_inputs, notes = inputs_for(request, model)
    return Loaded(request.model, model, example_inputs, type(model).__name__, notes)


def inputs_again(subject: Loaded, request: Request) -> Any:
    """Inputs of other sizes for a model that is loaded: a factory makes them, else its configuration does."""
    if subject.from_config:
        return inputs_for(request, subject.model)[0]
    return load(request, torch.device("meta")).example_inputs


def inputs_for(request: Request, model: nn.Module) -> tuple[Any, tuple[str, ...]]:
    """Inputs for a module that came without: made from its configuration, else its own `dummy_inputs`."""
    if hasattr(model, "config") and hasattr(model, "main_input_name"):
        from rewrite.cli.architectures import task_of
        from rewrite.cli.inputs import training_batch

        inputs, length = training_batch(request.model, model, task_of(model), request.batch or 1, request.seq)  # type: ignore[arg-type]
        return inputs, _batch_notes(inputs, request, length)
    dummy = getattr(model, "dummy_inputs", None)
    if dummy is not None:
        return dummy, ("Inputs: the model's own dummy_inputs.",)
    raise InputError(
        request.model,
        f"{type(model).__name__} came without example inputs",
        "return (module, example_inputs) from the factory",
    )


def _load_config(request: Request, device: torch.device) -> Loaded:
    from rewrite.cli import architectures
    from rewrite.cli.inputs import training_batch

    name = request.model
    overrides = parse_overrides(request.settings)
    if architectures.is_architecture(name):
        config = architectures.default_config(name, overrides)
    elif architectures.is_config_directory(Path(name)) or looks_like_hub_id(name):
        config = architectures.stored_config(name, name, overrides)
    else:
        raise unknown_model(name)
    task = architectures.task_for(name, config, request.task)
    model = architectures.build_model(name, config, task, device)
    inputs, length = training_batch(name, model, task, request.batch or 1, request.seq)
    sizes = f"batch {request.batch or 1}" + (f", sequence {length}" if length else "")
    description = f"{type(model).__name__} ({task.name}), {sizes}"
    return Loaded(name, model, inputs, description, (*_batch_notes(inputs, request, length), *_config_notes(config)))


def _config_notes(config: Any) -> tuple[str, ...]:
    """Options of a config that do other than their names promise."""
    size = getattr(config, "chunk_size_feed_forward", 0)
    if not size:
        return ()
    cause = "saves 0 bytes in training, as autograd holds what every chunk makes"
    return (f"chunk_size_feed_forward={size} {cause}; -p chunk-ffn computes each chunk again, and saves them.",)


def _batch_notes(inputs: Any, request: Request, length: int | None) -> tuple[str, ...]:
    chosen = [text for size, text in ((request.batch, "--batch 1"), (request.seq, f"--seq {length}")) if size is None]
    if length is None:
        chosen = [text for text in chosen if not text.startswith("--seq")]
    notes = [f"Chosen: {' '.join(chosen)}."] if chosen else []
    if isinstance(inputs, dict) and inputs.get("use_cache") is False:
        notes.append("use_cache is off: a training step needs no key-value cache.")
    return tuple(notes)


def looks_like_hub_id(name: str) -> bool:
    """Whether `name` has the form owner/name and is no path."""
    owner, slash, rest = name.partition("/")
    is_path = name.startswith((".", "/", "~")) or Path(name).exists() or Path(owner).is_dir()
    return bool(slash and owner and rest) and "/" not in rest and not is_path


def unknown_model(name: str) -> ModelError:
    """The error for a MODEL that is none of the forms, with the likeliest meaning as its next step."""
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelError(name, "the directory has no config.json", "give a directory that save_pretrained wrote")
    if name.endswith(".py"):
        return ModelError(name, "names a file but no factory in it", f"write {name}:factory")
    if "/" in name or name.startswith("."):
        return ModelError(name, "there is no such directory", "check the path, or give an architecture such as bert")
    from rewrite.cli.architectures import close_architectures

    close = close_architectures(name)
    hint = f"did you mean {' or '.join(close)}?" if close else "give bert, gpt2, llama, a directory, or file.py:factory"
    return ModelError(name, "is no transformers architecture, directory or factory", hint)
