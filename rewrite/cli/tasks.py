"""Training tasks by the names the command line uses. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One training task and the transformers auto class that adds its head."""

    name: str
    auto_class: str
    mapping: str
    """The table of transformers that says which architectures have the head."""


HEADS = tuple(
    Task(name, auto_class, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
    for name, auto_class, mapping in (
        ("speech-seq2seq", "AutoModelForSpeechSeq2Seq", "SPEECH_SEQ_2_SEQ"),
        ("seq2seq-lm", "AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM"),
        ("masked-lm", "AutoModelForMaskedLM", "MASKED_LM"),
        ("causal-lm", "AutoModelForCausalLM", "CAUSAL_LM"),
        ("ctc", "AutoModelForCTC", "CTC"),
        ("contrastive", "AutoModelForZeroShotImageClassification", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
        ("image-text-to-text", "AutoModelForImageTextToText", "IMAGE_TEXT_TO_TEXT"),
        ("image-classification", "AutoModelForImageClassification", "IMAGE_CLASSIFICATION"),
        ("semantic-segmentation", "AutoModelForSemanticSegmentation", "SEMANTIC_SEGMENTATION"),
        ("depth-estimation", "AutoModelForDepthEstimation", "DEPTH_ESTIMATION"),
        ("mask-generation", "AutoModelForMaskGeneration", "MASK_GENERATION"),
        ("video-classification", "AutoModelForVideoClassification", "VIDEO_CLASSIFICATION"),
        ("masked-image-modeling", "AutoModelForMaskedImageModeling", "MASKED_IMAGE_MODELING"),
        ("audio-classification", "AutoModelForAudioClassification", "AUDIO_CLASSIFICATION"),
        ("sequence-classification", "AutoModelForSequenceClassification", "SEQUENCE_CLASSIFICATION"),
        ("token-classification", "AutoModelForTokenClassification", "TOKEN_CLASSIFICATION"),
        ("question-answering", "AutoModelForQuestionAnswering", "QUESTION_ANSWERING"),
        ("multiple-choice", "AutoModelForMultipleChoice", "MULTIPLE_CHOICE"),
        ("next-sentence-prediction", "AutoModelForNextSentencePrediction", "NEXT_SENTENCE_PREDICTION"),
    )
)
TASKS = (*HEADS, Task("feature-extraction", "AutoModel", "MODEL_MAPPING_NAMES"))
"""In the order in which an architecture's default is looked for: the head it was pretrained with comes first."""

TASK_NAMES = tuple(task.name for task in TASKS)


def task_named(name: str) -> Task:
    """The task called `name`; raises KeyError."""
    for task in TASKS:
        if task.name == name:
            return task
    raise KeyError(name)


def default_task(available: Collection[str]) -> Task | None:
    """The first task, in pretraining order, among the `available` names."""
    return next((task for task in TASKS if task.name in available), None)
