"""What a training batch holds beside the inputs, per task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from rewrite.cli.tasks import Task

ONE_LABEL = (
    "image-classification",
    "video-classification",
    "audio-classification",
    "sequence-classification",
    "next-sentence-prediction",
)
TOKENS_ARE_LABELS = ("causal-lm", "masked-lm", "seq2seq-lm", "image-text-to-text")


def task_labels(
    model: transformers.PreTrainedModel,
    task: Task,
    inputs: Mapping[str, Any],
    accepted: Mapping[str, Any],
    batch: int,
    length: int | None,
    random: torch.Generator,
) -> dict[str, Any]:
    """The labels of `task` for `inputs`, int64; empty where the task has none."""
    config = model.config
    if task.name in TOKENS_ARE_LABELS and "input_ids" in inputs:
        return {"labels": inputs["input_ids"].clone()}
    if task.name == "speech-seq2seq":
        return {"labels": torch.randint(text_config(config).vocab_size // 2, (batch, length or 1), generator=random)}
    if task.name == "sequence-classification" and config.is_encoder_decoder:
        inputs["input_ids"][..., -1] = config.eos_token_id or 0  # the classifier reads the last end-of-sequence token
    if task.name in ONE_LABEL:
        count = 2 if task.name == "next-sentence-prediction" else config.num_labels
        return {"labels": torch.randint(count, (batch,), generator=random)}
    if task.name == "token-classification":
        return {"labels": torch.randint(config.num_labels, (batch, length or 1), generator=random)}
    if task.name == "multiple-choice":
        return {"labels": torch.randint(2, (batch,), generator=random)}
    if task.name == "question-answering":
        positions = torch.randint(length or 1, (2, batch), generator=random)
        return {"start_positions": positions[0], "end_positions": positions[1]}
    if task.name == "ctc":
        blank = config.pad_token_id or 0
        labels = torch.randint(1, config.vocab_size, (batch, 8), generator=random)
        return {"labels": labels.masked_fill(labels == blank, 1 if blank != 1 else 2)}
    if task.name == "contrastive":
        return {"return_loss": True} if "return_loss" in accepted else {}
    if task.name == "semantic-segmentation":
        size = inputs["pixel_values"].shape[-2:]
        return {"labels": torch.randint(config.num_labels, (batch, *size), generator=random)}
    if task.name == "masked-image-modeling":
        return {"bool_masked_pos": torch.rand(batch, patches(config, inputs), generator=random) < 0.5}
    if task.name == "mask-generation":
        return {"input_points": torch.rand(batch, 1, 1, 2, generator=random)} if "input_points" in accepted else {}
    if config.is_encoder_decoder and "decoder_input_ids" in accepted and "input_ids" in inputs:
        return {"decoder_input_ids": inputs["input_ids"].clone()}
    return {}


def text_config(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """The part of `config` that holds the vocabulary."""
    found = config.get_text_config()
    return found if hasattr(found, "vocab_size") else getattr(config, "text_config", found)


def patches(config: transformers.PretrainedConfig, inputs: Mapping[str, Any]) -> int:
    """How many patches the images are cut into."""
    height, width = inputs["pixel_values"].shape[-2:]
    count: int = (height // config.patch_size) * (width // config.patch_size)
    return count
