"""Transformers models from a configuration alone: no weights, no network, on any device."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from rewrite.cli.overrides import check_override
from rewrite.cli.tasks import TASKS, Task, default_task, task_named
from rewrite.errors import InputError, ModelError, RewriteError

OTHER_FORMS = "give a directory with a config.json, or file.py:factory"


def is_architecture(name: str) -> bool:
    """Whether transformers has an architecture of this name."""
    return name in transformers.CONFIG_MAPPING


def close_architectures(name: str) -> list[str]:
    """Architecture names that look like `name`, the likeliest first."""
    wanted = name.lower().replace("-", "_")
    spelled = {known.replace("-", "_"): known for known in transformers.CONFIG_MAPPING}
    if wanted in spelled:
        return [spelled[wanted]]
    return [spelled[found] for found in difflib.get_close_matches(wanted, spelled, n=3, cutoff=0.6)]


def default_config(architecture: str, overrides: Mapping[str, Any]) -> transformers.PretrainedConfig:
    """The architecture's default configuration with `overrides`. Raises `InputError` for an override that is wrong."""
    try:
        config = transformers.CONFIG_MAPPING[architecture]()
    except Exception as error:  # some architectures have no default that their own checks accept
        raise ModelError(architecture, f"has no default configuration: {brief(error)}", OTHER_FORMS) from error
    return override(architecture, config, {}, overrides)


def stored_config(subject: str, location: str, overrides: Mapping[str, Any]) -> transformers.PretrainedConfig:
    """The configuration stored at `location`, a directory or a hub id. Raises `ModelError`, `InputError`."""
    try:
        stored, _ = transformers.PretrainedConfig.get_config_dict(location)
    except (OSError, ValueError) as error:
        cause = _first_line(error) or "has no config.json that could be read"
        raise ModelError(subject, cause, "give a directory or a hub id that holds a config.json") from error
    architecture = str(stored.get("model_type"))
    if architecture not in transformers.CONFIG_MAPPING:
        raise ModelError(
            subject,
            f"its config.json has model_type {architecture!r}, which this transformers does not know",
            "install a transformers that has it, or give the model as file.py:factory",
        )
    config_class = transformers.CONFIG_MAPPING[architecture]
    return override(subject, config_class.from_dict(stored), stored, overrides)


def override(
    subject: str, config: transformers.PretrainedConfig, stored: Mapping[str, Any], overrides: Mapping[str, Any]
) -> transformers.PretrainedConfig:
    """`config` made again from the `stored` values with `overrides` among them, so that derived values follow."""
    if not overrides:
        return config
    values = dict(stored)
    known = config.to_dict() | {alias: getattr(config, alias, None) for alias in config.attribute_map}
    for key, value in overrides.items():
        head, _, rest = key.partition(".")
        if rest and isinstance(known.get(head), dict):
            check_override(f"{subject}'s {head}", rest, value, known[head])
            values[head] = {**known[head], **values.get(head, {}), rest: value}
            continue
        check_override(subject, key, value, known)
        values[config.attribute_map.get(key, key)] = value
    if "num_hidden_layers" in overrides and "layer_types" not in overrides:
        values.pop("layer_types", None)  # derived from the number of layers where it is not given
    try:
        return type(config)(**values)
    except Exception as error:  # a configuration class may raise anything
        settings = ", ".join(f"{key}={value}" for key, value in overrides.items())
        cause = f"{subject} refuses it: {brief(error)}"
        raise InputError(f"--set {settings}", cause, "give values that fit") from error


def task_for(subject: str, config: transformers.PretrainedConfig, wanted: str | None) -> Task:
    """The task to train: `wanted`, else what the stored model was made for, else the architecture's pretraining."""
    available = [task for task in TASKS if config.model_type in getattr(modeling_auto, task.mapping, {})]
    names = [task.name for task in available]
    if wanted is not None:
        if wanted in names:
            return task_named(wanted)
        raise ModelError(subject, f"has no {wanted} head in transformers", f"choose --task {' | '.join(names)}")
    for task in available:
        heads = getattr(modeling_auto, task.mapping)[config.model_type]
        if set(config.architectures or ()) & set([heads] if isinstance(heads, str) else heads):
            return task
    chosen = default_task(names)
    if chosen is None:
        raise ModelError(subject, "has no model class among transformers' auto classes", OTHER_FORMS)
    return chosen


def task_of(model: transformers.PreTrainedModel) -> Task:
    """The task whose head `model` has; feature extraction for a class transformers does not list."""
    for task in TASKS:
        heads = getattr(modeling_auto, task.mapping).get(model.config.model_type, ())
        if type(model).__name__ in ([heads] if isinstance(heads, str) else heads):
            return task
    return task_named("feature-extraction")


def build_model(
    subject: str, config: transformers.PretrainedConfig, task: Task, device: torch.device
) -> transformers.PreTrainedModel:
    """The model of `config` with the head of `task`, in train mode, on `device`. Raises `ModelError`."""
    auto_class = getattr(transformers, task.auto_class)
    needs_padding = task.name in ("sequence-classification", "multiple-choice")
    if needs_padding and getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0  # decoders refuse to classify a batch without one
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # labels are shifted behind it
    try:
        with device:
            model = auto_class.from_config(config)
    except RewriteError:
        raise
    except ImportError as error:
        raise ModelError(subject, f"needs a package that is missing: {brief(error)}", "install it") from error
    except Exception as error:  # a model's constructor may raise anything
        raise ModelError(
            subject, f"could not be built: {brief(error)}", "check --set and --task, or run again with -v"
        ) from error
    built: transformers.PreTrainedModel = model.to(device).train()  # a constructor may name a device of its own
    return built


def brief(error: BaseException) -> str:
    """An exception as one line: its class and the first line of its text."""
    return f"{type(error).__name__}: {_first_line(error)}" if _first_line(error) else type(error).__name__


def _first_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


def is_config_directory(path: Path) -> bool:
    """Whether `path` is a directory with a stored configuration."""
    return path.is_dir() and (path / "config.json").is_file()
