"""Bidirectional text encoders."""

from __future__ import annotations

import transformers as hf

from tests.zoo.entry import TEXT_MASKS, VOCABULARY, Entry, classification_inputs, masked_inputs

SHAPES = ((3, 12), (2, 17))
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3}
BERT = {**COMMON, "intermediate_size": 64, "max_position_embeddings": 64, "num_labels": 3, "pad_token_id": 0}
DISTILBERT = {"vocab_size": VOCABULARY, "dim": 32, "n_heads": 4, "n_layers": 3, "hidden_dim": 64, "num_labels": 3}
DEBERTA = {
    **BERT,
    "relative_attention": True,
    "position_buckets": 8,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}
MODERNBERT = {
    **BERT,
    "attention_dropout": 0.1,
    "embedding_dropout": 0.1,
    "mlp_dropout": 0.1,
    "classifier_dropout": 0.1,
    "local_attention": 8,
    "global_attn_every_n_layers": 2,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
}

ENCODERS = (
    Entry(
        "bert",
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**BERT)),
        classification_inputs,
        SHAPES,
        TEXT_MASKS,
    ),
    Entry("roberta", lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**BERT)), masked_inputs, SHAPES, TEXT_MASKS),
    Entry(
        "distilbert",
        lambda: hf.DistilBertForSequenceClassification(hf.DistilBertConfig(**DISTILBERT, max_position_embeddings=64)),
        classification_inputs,
        SHAPES,
        TEXT_MASKS,
    ),
    Entry(
        "electra",
        lambda: hf.ElectraForSequenceClassification(hf.ElectraConfig(**BERT, embedding_size=16)),
        classification_inputs,
        SHAPES,
        TEXT_MASKS,
    ),
    Entry(
        "deberta-v2",
        lambda: hf.DebertaV2ForSequenceClassification(hf.DebertaV2Config(**DEBERTA)),
        classification_inputs,
        SHAPES,
        TEXT_MASKS,
    ),
    Entry(
        "albert",
        lambda: hf.AlbertForSequenceClassification(
            hf.AlbertConfig(
                **BERT, embedding_size=16, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, inner_group_num=1
            )
        ),
        classification_inputs,
        SHAPES,
        TEXT_MASKS,
        bar=False,
    ),
    Entry(
        "modernbert",
        lambda: hf.ModernBertForMaskedLM(hf.ModernBertConfig(**MODERNBERT)),
        masked_inputs,
        SHAPES,
        TEXT_MASKS,
        bar=False,
    ),
)
