"""Models of transformers with their default dropout, untrained, in float32."""

from __future__ import annotations

import torch
import transformers as hf

from tests.bench.workload import Head, Workload


def bert_like(
    layers: int = 12, width: int = 256, length: int = 256, batch: int = 8, attention: str = "eager"
) -> Workload:
    """A classifier with dropout 0.1, its attention written out."""
    torch.manual_seed(0)
    config = hf.BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=4,
        intermediate_size=4 * width,
        vocab_size=1000,
        attn_implementation=attention,
        problem_type="single_label_classification",  # set in the first forward otherwise: compiled twice
    )
    model = hf.BertForSequenceClassification(config)
    ids = torch.randint(0, 1000, (batch, length))
    labels = torch.zeros(batch, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    blocks = list(model.bert.encoder.layer)
    return Workload(model, inputs, blocks, feed_forwards=[(block, "feed_forward_chunk") for block in blocks])


def llama_like(
    layers: int = 12, width: int = 256, length: int = 1024, batch: int = 1, vocabulary: int = 32000
) -> Workload:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=11 * width // 4,
        vocab_size=vocabulary,
        max_position_embeddings=length,
        use_cache=False,
    )
    model = hf.LlamaForCausalLM(config)
    ids = torch.randint(0, vocabulary, (batch, length))
    blocks = list(model.model.layers)
    return Workload(
        model,
        {"input_ids": ids, "labels": ids},
        blocks,
        feed_forwards=[(block.mlp, "forward") for block in blocks],
        head=Head(lambda: model.model(input_ids=ids)[0].flatten(0, 1), model.lm_head, next_tokens(ids)),
    )


def gpt2_like(
    layers: int = 12, width: int = 256, length: int = 512, batch: int = 1, vocabulary: int = 32000
) -> Workload:
    """Dropout 0.1; the head is tied to the embedding."""
    torch.manual_seed(0)
    config = hf.GPT2Config(n_layer=layers, n_embd=width, n_head=4, vocab_size=vocabulary, use_cache=False)
    model = hf.GPT2LMHeadModel(config)
    ids = torch.randint(0, vocabulary, (batch, length))
    blocks = list(model.transformer.h)
    return Workload(
        model,
        {"input_ids": ids, "labels": ids},
        blocks,
        feed_forwards=[(block.mlp, "forward") for block in blocks],
        head=Head(lambda: model.transformer(input_ids=ids)[0].flatten(0, 1), model.lm_head, next_tokens(ids)),
    )


def t5_like(layers: int = 6, width: int = 256, length: int = 256, batch: int = 2, vocabulary: int = 8000) -> Workload:
    """Encoder and decoder of `layers` each; their blocks hand on position biases beside the hidden states."""
    torch.manual_seed(0)
    config = hf.T5Config(
        num_layers=layers,
        d_model=width,
        d_kv=width // 4,
        num_heads=4,
        d_ff=4 * width,
        vocab_size=vocabulary,
        use_cache=False,
        decoder_start_token_id=0,
    )
    model = hf.T5ForConditionalGeneration(config)
    ids = torch.randint(1, vocabulary, (batch, length))
    blocks = [*model.encoder.block, *model.decoder.block]
    return Workload(
        model,
        {"input_ids": ids, "labels": ids},
        blocks,
        chained=False,
        feed_forwards=[(block.layer[-1], "forward") for block in blocks],
        head=Head(lambda: _decoded(model, ids), model.lm_head, ids.flatten()),
    )


def _decoded(model: hf.T5ForConditionalGeneration, ids: torch.Tensor) -> torch.Tensor:
    encoded = model.encoder(input_ids=ids)[0]
    shifted = model.prepare_decoder_input_ids_from_labels(ids)
    hidden = model.decoder(input_ids=shifted, encoder_hidden_states=encoded)[0].flatten(0, 1)
    return hidden * model.model_dim**-0.5 if model.config.scale_decoder_outputs else hidden


def next_tokens(ids: torch.Tensor) -> torch.Tensor:
    """What a causal model is asked for at each place of `ids`, (tokens,): -100 at the end of each sequence."""
    targets = torch.full_like(ids, -100)
    targets[:, :-1] = ids[:, 1:]
    return targets.flatten()
