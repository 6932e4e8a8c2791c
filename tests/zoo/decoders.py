"""Causal language models. `use_cache` stays at its default, which in training fills a key-value cache."""

from __future__ import annotations

import transformers as hf

from tests.zoo.entry import TEXT_MASKS, VOCABULARY, Entry, causal_inputs

SHAPES = ((2, 12), (3, 9))
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
    **SPECIAL,
}
EXPERTS = {**LLAMA, "num_hidden_layers": 2, "num_experts_per_tok": 2, "output_router_logits": True}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64, **SPECIAL}
NEOX = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    **SPECIAL,
}
OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    **SPECIAL,
}
BLOOM = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "n_layer": 3,
    "n_head": 4,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    **SPECIAL,
}
PHI = {**LLAMA, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "sliding_window": 8}
GEMMA = {**LLAMA, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}
GEMMA3 = {**GEMMA, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4, **SPECIAL}
MAMBA2 = {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8, "expand": 2}


def _causal(name: str, model: str, config: dict[str, object], *, bar: bool = True) -> Entry:
    def construct() -> hf.PreTrainedModel:
        return getattr(hf, f"{model}ForCausalLM")(getattr(hf, f"{model}Config")(**config))

    return Entry(name, construct, causal_inputs, SHAPES, TEXT_MASKS, bar)


DECODERS = (
    Entry("gpt2", lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)), causal_inputs, SHAPES, TEXT_MASKS),
    _causal("gpt-neox", "GPTNeoX", NEOX),
    _causal("llama", "Llama", LLAMA),
    _causal("mistral", "Mistral", {**LLAMA, "sliding_window": 8}),
    _causal("qwen2", "Qwen2", LLAMA),
    _causal("qwen3", "Qwen3", {**LLAMA, "head_dim": 8}),
    _causal("gemma2", "Gemma2", GEMMA),
    _causal("phi3", "Phi3", PHI),
    _causal("mixtral", "Mixtral", {**EXPERTS, "num_local_experts": 4}),
    _causal(
        "qwen3-moe",
        "Qwen3Moe",
        {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, "decoder_sparse_step": 1},
    ),
    _causal("mamba", "Mamba", MAMBA),
    _causal("opt", "OPT", OPT, bar=False),
    _causal("bloom", "Bloom", BLOOM, bar=False),
    Entry(
        "gemma3", lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GEMMA3)), causal_inputs, SHAPES, TEXT_MASKS, False
    ),
    _causal("mamba2", "Mamba2", MAMBA2, bar=False),
)
