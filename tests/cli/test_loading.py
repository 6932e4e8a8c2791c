"""Models by name: each builds on the meta device with a batch that its forward takes."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch
import transformers

from rewrite.cli.inputs import position_limit
from rewrite.cli.loading import Loaded, Request, load, looks_like_hub_id
from rewrite.errors import InputError, ModelError

META = torch.device("meta")

DEFAULT_TASKS = {
    "bert": "masked-lm",
    "roberta": "masked-lm",
    "distilbert": "masked-lm",
    "electra": "masked-lm",
    "deberta-v2": "masked-lm",
    "gpt2": "causal-lm",
    "gpt_neox": "causal-lm",
    "llama": "causal-lm",
    "mistral": "causal-lm",
    "qwen2": "causal-lm",
    "qwen3": "causal-lm",
    "gemma2": "causal-lm",
    "phi3": "causal-lm",
    "mixtral": "causal-lm",
    "qwen3_moe": "causal-lm",
    "mamba": "causal-lm",
    "t5": "seq2seq-lm",
    "bart": "seq2seq-lm",
    "vit": "image-classification",
    "swin": "image-classification",
    "convnext": "image-classification",
    "resnet": "image-classification",
    "wav2vec2": "ctc",
    "whisper": "speech-seq2seq",
    "clip": "contrastive",
    "sam": "mask-generation",
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", DEFAULT_TASKS)
def test_an_architecture_builds_without_storage(name: str) -> None:
    loaded = load(Request(name, batch=2), META)

    assert f"({DEFAULT_TASKS[name]})" in loaded.description
    assert loaded.model.training
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    accepted = inspect.signature(loaded.model.forward).parameters
    assert set(loaded.example_inputs) <= set(accepted)
    for key, value in loaded.example_inputs.items():
        if isinstance(value, torch.Tensor):
            assert (value.device.type, value.shape[0]) == ("cpu", 2), key


SMALL = {
    "bert": ("num_hidden_layers=1", "hidden_size=32", "num_attention_heads=2", "intermediate_size=32"),
    "gpt2": ("n_layer=1", "n_embd=32", "n_head=2"),
    "bart": (
        "encoder_layers=1",
        "decoder_layers=1",
        "d_model=32",
        "encoder_attention_heads=2",
        "decoder_attention_heads=2",
    ),
    "t5": ("num_layers=1", "d_model=32", "d_ff=32", "d_kv=8", "num_heads=2"),
    "vit": ("num_hidden_layers=1", "hidden_size=32", "num_attention_heads=2", "intermediate_size=32", "image_size=32"),
}
TASKS = [
    ("bert", "masked-lm"),
    ("bert", "causal-lm"),
    ("bert", "sequence-classification"),
    ("bert", "token-classification"),
    ("bert", "question-answering"),
    ("bert", "multiple-choice"),
    ("bert", "next-sentence-prediction"),
    ("bert", "feature-extraction"),
    ("gpt2", "causal-lm"),
    ("gpt2", "sequence-classification"),
    ("bart", "seq2seq-lm"),
    ("bart", "sequence-classification"),
    ("bart", "feature-extraction"),
    ("t5", "seq2seq-lm"),
    ("t5", "token-classification"),
    ("vit", "image-classification"),
    ("vit", "masked-image-modeling"),
]


@pytest.mark.parametrize(("name", "task"), TASKS)
def test_the_batch_of_every_task_trains(name: str, task: str) -> None:
    seq = None if name == "vit" else 12
    loaded = load(Request(name, task=task, batch=2, seq=seq, settings=SMALL[name]), torch.device("cpu"))
    output = loaded.model(**loaded.example_inputs)

    if task == "feature-extraction":
        assert output.last_hidden_state.shape[0] == 2
        return
    output.loss.backward()
    assert torch.isfinite(output.loss)


def test_token_ids_are_in_range_and_no_placeholder() -> None:
    loaded = load(Request("bert", batch=4), META)
    ids = loaded.example_inputs["input_ids"]

    assert int(ids.min()) >= 0
    assert int(ids.max()) < loaded.model.config.vocab_size
    assert not (ids == loaded.model.config.pad_token_id).any()


def test_the_same_command_makes_the_same_batch() -> None:
    first, second = (load(Request("bert", batch=2), META).example_inputs for _ in range(2))

    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_training_step_keeps_no_cache_and_says_so() -> None:
    loaded = load(Request("llama"), META)

    assert loaded.example_inputs["use_cache"] is False
    assert any("use_cache is off" in note for note in loaded.notes)
    assert "Chosen: --batch 1 --seq 512." in loaded.notes


def test_chunking_of_transformers_that_saves_nothing_is_told() -> None:
    loaded = load(Request("bert", settings=("chunk_size_feed_forward=64",)), META)

    assert (
        "chunk_size_feed_forward=64 saves 0 bytes in training, as autograd holds what every chunk makes; "
        "-p chunk-ffn computes each chunk again, and saves them."
    ) in loaded.notes


@pytest.mark.parametrize(
    ("name", "limit"), [("bert", 512), ("roberta", 510), ("bart", 1024), ("gpt2", 1024), ("llama", None)]
)
def test_positions_bound_the_sequence(name: str, limit: int | None) -> None:
    loaded = load(Request(name, seq=8), META)

    assert position_limit(loaded.model) == limit
    if limit is not None:
        with pytest.raises(InputError, match=f"{name} has {limit} positions"):
            load(Request(name, seq=limit + 1), META)


def settings(loaded: Loaded) -> transformers.PretrainedConfig:
    return loaded.model.config


def test_settings_are_typed_and_follow_other_names() -> None:
    config = settings(load(Request("gpt2", settings=("num_hidden_layers=2", "scale_attn_weights=false")), META))

    assert (config.n_layer, config.scale_attn_weights) == (2, False)


def test_settings_reach_values_derived_from_them() -> None:
    config = settings(load(Request("gemma2", settings=("num_hidden_layers=3",)), META))

    assert len(config.layer_types) == 3


def test_settings_reach_parts_of_a_configuration() -> None:
    loaded = load(
        Request("clip", settings=("text_config.num_hidden_layers=2", "vision_config.num_hidden_layers=1")), META
    )

    assert len(loaded.model.text_model.encoder.layers) == 2
    assert len(loaded.model.vision_model.encoder.layers) == 1


@pytest.mark.parametrize(
    ("setting", "cause"),
    [
        ("num_hidden_layers=true", "has an int there"),
        ("hidden_dropout_prob=much", "has a float there"),
        ("text_config.x=1", "is no setting"),
        ("=3", "not of the form"),
    ],
)
def test_settings_that_do_not_fit(setting: str, cause: str) -> None:
    with pytest.raises(InputError, match=cause):
        load(Request("bert", settings=(setting,)), META)


def test_a_directory_keeps_its_task_and_takes_settings(tmp_path: Path) -> None:
    config = transformers.BertConfig(num_hidden_layers=5, architectures=["BertForTokenClassification"])
    config.save_pretrained(tmp_path)
    loaded = load(Request(str(tmp_path), settings=("num_hidden_layers=2",)), META)

    assert type(loaded.model).__name__ == "BertForTokenClassification"
    assert settings(loaded).num_hidden_layers == 2


def test_a_directory_of_an_unknown_kind_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "quux"}))
    with pytest.raises(ModelError, match="model_type 'quux'"):
        load(Request(str(tmp_path)), META)


def test_hub_ids_are_told_from_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()

    assert looks_like_hub_id("meta-llama/Llama-3.2-1B")
    assert not any(map(looks_like_hub_id, ("bert", "./a/b", "/a/b", "a/b/c", "runs/bert", "~/bert")))


def test_a_factory_of_a_transformers_model_gets_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "mine_for_loading.py"
    path.write_text(
        "import transformers\n"
        "def tiny(layers=1):\n"
        "    config = transformers.GPT2Config(n_layer=layers, n_embd=32, n_head=2)\n"
        "    return transformers.GPT2LMHeadModel(config)\n"
    )
    loaded = load(Request(f"{path}:tiny", batch=3, seq=7, settings=("layers=2",)), META)

    assert loaded.example_inputs["labels"].shape == (3, 7)
    assert settings(loaded).n_layer == 2
