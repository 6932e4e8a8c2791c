"""Encoder-decoder models: text, and speech to text."""

from __future__ import annotations

import torch
import transformers as hf

from tests.zoo.entry import TEXT_MASKS, VOCABULARY, Entry, Inputs, Mask, tokens, with_mask

SHAPES = ((2, 12), (3, 9))
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.1,
    "decoder_start_token_id": 0,
}
WHISPER = {
    **BART,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 64,
    "begin_suppress_tokens": [],
}
del WHISPER["max_position_embeddings"]


def translation_inputs(batch: int, length: int, mask: Mask) -> Inputs:
    """Source tokens, and target tokens of another length as labels."""
    inputs = with_mask({"input_ids": tokens(batch, length)}, batch, length, mask)
    return {**inputs, "labels": tokens(batch, length - 2)}


def transcription_inputs(batch: int, length: int, mask: Mask) -> Inputs:
    """Log-mel features, float32 (batch, 8, 40), and `length` target tokens as labels."""
    return {"input_features": torch.randn(batch, 8, 40), "labels": tokens(batch, length)}


SEQUENCE_TO_SEQUENCE = (
    Entry("t5", lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5)), translation_inputs, SHAPES, TEXT_MASKS),
    Entry(
        "bart", lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART)), translation_inputs, SHAPES, TEXT_MASKS
    ),
    Entry(
        "marian", lambda: hf.MarianMTModel(hf.MarianConfig(**BART)), translation_inputs, SHAPES, TEXT_MASKS, bar=False
    ),
    Entry(
        "whisper",
        lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**WHISPER)),
        transcription_inputs,
        SHAPES,
        bar=False,
    ),
)
