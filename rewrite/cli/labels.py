"""What a training batch holds beside the inputs, per task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from rewrite.cli.tasks import Task


@dataclass(frozen=True)
class Unlabelled:
    """A batch without labels yet."""

    config: transformers.PretrainedConfig
    inputs: Mapping[str, Any]
    accepted: Mapping[str, Any]
    """The parameters of the model's forward, by name."""
    batch: int
    length: int
    """Length of the sequences; 1 where the model has none."""
    random: torch.Generator

    def draw(self, below: int | None, *shape: int, first: int = 0) -> torch.Tensor:
        """Random int64 of `shape` from `first` to `below`, exclusive; without a bound `first` alone."""
        below = first + 1 if below is None else below
        return torch.randint(first, max(below, first + 1), shape, generator=self.random)


def task_labels(task: Task, made: Unlabelled) -> dict[str, Any]:
    """The labels of `task`, int64, as keyword arguments; empty where the task has none."""
    labels = LABELS.get(task.name)
    if labels is not None:
        return labels(made)
    if made.config.is_encoder_decoder and "decoder_input_ids" in made.accepted and "input_ids" in made.inputs:
        return {"decoder_input_ids": made.inputs["input_ids"].clone()}
    return {}


def text_config(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """The part of `config` that holds the vocabulary."""
    found = config.get_text_config()
    return found if hasattr(found, "vocab_size") else getattr(config, "text_config", found)


def _tokens(made: Unlabelled) -> dict[str, Any]:
    return {"labels": made.inputs["input_ids"].clone()} if "input_ids" in made.inputs else {}


def _transcript(made: Unlabelled) -> dict[str, Any]:
    return {"labels": made.draw(text_config(made.config).vocab_size // 2, made.batch, made.length)}


def _short_transcript(made: Unlabelled) -> dict[str, Any]:
    blank = made.config.pad_token_id or 0
    labels = made.draw(made.config.vocab_size, made.batch, 8, first=1)
    return {"labels": labels.masked_fill(labels == blank, 1 if blank != 1 else 2)}


def _class(made: Unlabelled) -> dict[str, Any]:
    return {"labels": made.draw(made.config.num_labels, made.batch)}


def _sentence_class(made: Unlabelled) -> dict[str, Any]:
    if made.config.is_encoder_decoder:  # the classifier reads the last end-of-sequence token
        made.inputs["input_ids"][..., -1] = made.config.eos_token_id or 0
    return _class(made)


def _either(made: Unlabelled) -> dict[str, Any]:
    return {"labels": made.draw(2, made.batch)}


def _token_classes(made: Unlabelled) -> dict[str, Any]:
    return {"labels": made.draw(made.config.num_labels, made.batch, made.length)}


def _span(made: Unlabelled) -> dict[str, Any]:
    positions = made.draw(made.length, 2, made.batch)
    return {"start_positions": positions[0], "end_positions": positions[1]}


def _pairs(made: Unlabelled) -> dict[str, Any]:
    return {"return_loss": True} if "return_loss" in made.accepted else {}


def _pixel_classes(made: Unlabelled) -> dict[str, Any]:
    height, width = made.inputs["pixel_values"].shape[-2:]
    return {"labels": made.draw(made.config.num_labels, made.batch, height, width)}


def _masked_patches(made: Unlabelled) -> dict[str, Any]:
    height, width = made.inputs["pixel_values"].shape[-2:]
    patches = (height // made.config.patch_size) * (width // made.config.patch_size)
    return {"bool_masked_pos": torch.rand(made.batch, patches, generator=made.random) < 0.5}


def _points(made: Unlabelled) -> dict[str, Any]:
    if "input_points" not in made.accepted:
        return {}
    return {"input_points": torch.rand(made.batch, 1, 1, 2, generator=made.random)}


LABELS: Mapping[str, Callable[[Unlabelled], dict[str, Any]]] = {
    "speech-seq2seq": _transcript,
    "seq2seq-lm": _tokens,
    "masked-lm": _tokens,
    "causal-lm": _tokens,
    "image-text-to-text": _tokens,
    "ctc": _short_transcript,
    "contrastive": _pairs,
    "image-classification": _class,
    "video-classification": _class,
    "audio-classification": _class,
    "sequence-classification": _sentence_class,
    "token-classification": _token_classes,
    "question-answering": _span,
    "multiple-choice": _either,
    "next-sentence-prediction": _either,
    "semantic-segmentation": _pixel_classes,
    "masked-image-modeling": _masked_patches,
    "mask-generation": _points,
}
