"""A training batch for a transformers model: small CPU tensors with sizes and ranges the model accepts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

from rewrite.cli.labels import Unlabelled, task_labels, text_config
from rewrite.cli.tasks import Task
from rewrite.errors import InputError

DEFAULT_TOKENS = 512
DEFAULT_SAMPLES = 16_000
"""One second of audio."""

OTHER_FORM = "give the model as file.py:factory that returns (module, inputs)"

Batch = dict[str, Any]


def training_batch(
    subject: str, model: transformers.PreTrainedModel, task: Task, batch: int, seq: int | None
) -> tuple[Batch, int | None]:
    """Keyword arguments for one training step of `model`, and the sequence length used (None: the model has none).

    Token ids and labels are int64, images and audio float32, from a generator with a fixed seed. Raises `InputError`
    for a sequence that the model has no positions for, and for a model whose inputs are not known.
    """
    try:
        return _make_batch(subject, model, task, batch, seq)
    except (AttributeError, TypeError, RuntimeError) as error:  # a configuration without what its kind usually has
        cause = f"no {task.name} batch could be made from its configuration: {' '.join(str(error).split())}"
        raise InputError(subject, cause, OTHER_FORM) from error


def _make_batch(
    subject: str, model: transformers.PreTrainedModel, task: Task, batch: int, seq: int | None
) -> tuple[Batch, int | None]:
    accepted = inspect.signature(model.forward).parameters
    random = torch.Generator().manual_seed(0)
    inputs: Batch = {}
    used = seq
    if _takes_images(model, accepted, task):
        inputs["pixel_values"] = images(model.config, batch, random, video=task.name == "video-classification")
    if _takes_audio(model, accepted):
        used = add_audio(inputs, model, accepted, batch, seq, random)
    if "input_ids" in accepted and (not inputs or task.name == "contrastive"):
        used = text_length(subject, model, seq)
        shape = (batch, 2, used) if task.name == "multiple-choice" else (batch, used)
        inputs["input_ids"] = token_ids(model.config, shape, random)
        if "attention_mask" in accepted:
            inputs["attention_mask"] = torch.ones(shape, dtype=torch.int64)
    if not inputs:
        names = ", ".join(accepted)
        raise InputError(subject, f"no inputs are known for its forward({names})", OTHER_FORM)
    length = text_length(subject, model, seq) if task.name == "speech-seq2seq" else used
    inputs |= task_labels(task, Unlabelled(model.config, inputs, accepted, batch, length or 1, random))
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    elif getattr(model.config, "use_cache", False):
        model.config.use_cache = False
    return inputs, length


def _takes_images(model: transformers.PreTrainedModel, accepted: Mapping[str, Any], task: Task) -> bool:
    if "pixel_values" not in accepted:
        return False
    return "input_ids" not in accepted or task.name == "contrastive" or model.main_input_name == "pixel_values"


def _takes_audio(model: transformers.PreTrainedModel, accepted: Mapping[str, Any]) -> bool:
    return bool({"input_values", "input_features"} & set(accepted)) and "input_ids" not in accepted


def images(config: transformers.PretrainedConfig, batch: int, random: torch.Generator, *, video: bool) -> torch.Tensor:
    """Pixels of shape (batch, channels, height, width), for video (batch, frames, channels, height, width)."""
    vision = getattr(config, "vision_config", config)
    height, width = _image_size(vision)
    channels = getattr(vision, "num_channels", None) or 3
    frames = (getattr(vision, "num_frames", 8),) if video else ()
    return torch.rand(batch, *frames, channels, height, width, generator=random)


def _image_size(config: transformers.PretrainedConfig) -> tuple[int, int]:
    size = getattr(config, "image_size", None) or 224
    if isinstance(size, Mapping):
        return size["height"], size["width"]
    return (size, size) if isinstance(size, int) else (size[-2], size[-1])


def add_audio(
    inputs: Batch,
    model: transformers.PreTrainedModel,
    accepted: Mapping[str, Any],
    batch: int,
    seq: int | None,
    random: torch.Generator,
) -> int:
    """Put the waveform (batch, samples) or the spectrogram into `inputs`; return the length used."""
    config = model.config
    if "input_features" in accepted and hasattr(config, "num_mel_bins"):
        frames = 2 * getattr(config, "max_source_positions", 1500)  # Whisper's encoder accepts this length only
        inputs["input_features"] = torch.randn(batch, int(config.num_mel_bins), frames, generator=random)
        return frames
    if "input_features" in accepted:
        width = int(getattr(config, "feature_projection_input_dim", 0) or getattr(config, "input_feat_per_channel", 80))
        length = seq or DEFAULT_TOKENS
        inputs["input_features"] = torch.randn(batch, length, width, generator=random)
        return length
    if hasattr(config, "num_mel_bins"):
        length = getattr(config, "max_length", None) or DEFAULT_TOKENS
        inputs["input_values"] = torch.randn(batch, length, config.num_mel_bins, generator=random)
        return length
    samples = seq or DEFAULT_SAMPLES
    inputs["input_values"] = torch.randn(batch, samples, generator=random)
    return samples


def text_length(subject: str, model: transformers.PreTrainedModel, seq: int | None) -> int:
    """`seq`, or the default that fits. Raises `InputError` where the model has fewer positions."""
    limit = position_limit(model)
    if seq is None:
        return min(DEFAULT_TOKENS, limit or DEFAULT_TOKENS)
    if limit is not None and seq > limit:
        config = text_config(model.config)
        key = next((name for name in ("max_position_embeddings", "max_target_positions") if hasattr(config, name)), "")
        hint = f" or --set {key}={seq + getattr(config, key) - limit}" if key else ""
        raise InputError(f"--seq {seq}", f"{subject} has {limit} positions", f"use --seq {limit}{hint}")
    return seq


def position_limit(model: nn.Module) -> int | None:
    """How many tokens the learned or tabulated position embeddings allow; None where positions are unbounded."""
    limits = []
    for path, module in model.named_modules():
        leaf = path.rpartition(".")[2]
        if not isinstance(module, nn.Embedding) or not ("pos" in leaf or leaf == "wpe"):
            continue
        if any(part in path for part in ("vision", "visual", "image")) or takes_no_tokens(model, path):
            continue
        offset = getattr(module, "offset", 0 if module.padding_idx is None else module.padding_idx + 1)
        limits.append(module.num_embeddings - offset)
    return min(limits, default=None)


def takes_no_tokens(model: nn.Module, path: str) -> bool:
    """Whether `path` lies in an encoder of something other than text."""
    return "encoder" in path.split(".") and getattr(model, "main_input_name", "") != "input_ids"


def token_ids(config: transformers.PretrainedConfig, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Random ids below the vocabulary size that are no padding, end, mask or image placeholder."""
    text = text_config(config)
    ids = torch.randint(text.vocab_size, shape, generator=random)
    special = _special_ids(config) | _special_ids(text)
    plain = next((candidate for candidate in range(text.vocab_size) if candidate not in special), 0)
    for token in special:
        ids[ids == token] = plain
    return ids


def _special_ids(config: transformers.PretrainedConfig) -> set[int]:
    found: set[int] = set()
    for key, value in config.to_dict().items():
        if key.endswith(("_token_id", "_token_index", "_token_ids")):
            found |= {token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int)}
    return found
