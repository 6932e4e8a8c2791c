"""Images, sound, and images with text."""

from __future__ import annotations

import torch
import transformers as hf
from torch import nn
from torch.nn import functional

from tests.zoo.entry import Entry, Inputs, Mask, attention_mask, image_inputs, tokens, with_mask

VIT = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "num_labels": 3,
}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "drop_path_rate": 0.1,
    "num_labels": 3,
}
CONVNEXT = {
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [2, 2, 2, 1],
    "drop_path_rate": 0.3,
    "layer_scale_init_value": 1.0,
    "num_labels": 3,
}
RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [2, 2, 2, 1],
    "layer_type": "basic",
    "num_labels": 3,
}
WAV2VEC2 = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 2, 2),
    "conv_kernel": (10, 3, 2),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_length": 2,
    "mask_time_prob": 0.2,
    "layerdrop": 0.1,
}
SAM = {"hidden_size": 32, "mlp_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "iou_head_hidden_dim": 32}
CLIP_TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "attention_dropout": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CLIP_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "attention_dropout": 0.1,
}


class MaskDecoder(nn.Module):
    """SAM's mask decoder with a segmentation loss: binary cross-entropy of the masks plus the score's error."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.sam.modeling_sam import SamMaskDecoder

        self.decoder = SamMaskDecoder(hf.SamMaskDecoderConfig(**SAM))

    def forward(
        self,
        image_embeddings: torch.Tensor,
        image_positional_embeddings: torch.Tensor,
        sparse_prompt_embeddings: torch.Tensor,
        dense_prompt_embeddings: torch.Tensor,
        labels: torch.Tensor,
    ) -> torch.Tensor:
        masks, scores = self.decoder(
            image_embeddings=image_embeddings,
            image_positional_embeddings=image_positional_embeddings,
            sparse_prompt_embeddings=sparse_prompt_embeddings,
            dense_prompt_embeddings=dense_prompt_embeddings,
            multimask_output=True,
        )[:2]
        target = labels[:, None, None].expand_as(masks)
        return functional.binary_cross_entropy_with_logits(masks, target) + (scores**2).mean()


def mask_decoder_inputs(batch: int, length: int, mask: Mask) -> Inputs:
    """Embeddings of (batch, 32, length, length), three prompt points, and target masks four times the side."""
    return {
        "image_embeddings": torch.randn(batch, 32, length, length),
        "image_positional_embeddings": torch.randn(batch, 32, length, length),
        "sparse_prompt_embeddings": torch.randn(batch, 1, 3, 32),
        "dense_prompt_embeddings": torch.randn(batch, 32, length, length),
        "labels": (torch.rand(batch, 4 * length, 4 * length) > 0.5).float(),
    }


def speech_inputs(batch: int, length: int, mask: Mask) -> Inputs:
    """Waveforms, float32 (batch, length), and four labels for each."""
    inputs = {"input_values": torch.randn(batch, length), "labels": torch.randint(1, 32, (batch, 4))}
    given = attention_mask(batch, length, mask)
    return inputs if given is None else {**inputs, "attention_mask": given}


def pair_inputs(batch: int, length: int, mask: Mask) -> Inputs:
    """Captions of `length` tokens that end in the end token, and an image for each."""
    inputs = with_mask({"input_ids": tokens(batch, length)}, batch, length, mask)
    inputs["input_ids"][:, -1] = 2
    return {**inputs, "pixel_values": torch.randn(batch, 3, 16, 16), "return_loss": True}


def _clip() -> nn.Module:
    return hf.CLIPModel(hf.CLIPConfig(text_config=CLIP_TEXT, vision_config=CLIP_VISION, projection_dim=16))


PERCEPTION = (
    Entry("vit", lambda: hf.ViTForImageClassification(hf.ViTConfig(**VIT)), image_inputs, ((2, 16), (3, 16))),
    Entry("swin", lambda: hf.SwinForImageClassification(hf.SwinConfig(**SWIN)), image_inputs, ((2, 32), (3, 28))),
    Entry(
        "wav2vec2",
        lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**WAV2VEC2)),
        speech_inputs,
        ((2, 500), (3, 420)),
        ("padded", "unpadded", "absent"),
    ),
    Entry("sam-mask-decoder", MaskDecoder, mask_decoder_inputs, ((2, 4), (1, 6))),
    Entry(
        "convnext",
        lambda: hf.ConvNextForImageClassification(hf.ConvNextConfig(**CONVNEXT)),
        image_inputs,
        ((2, 64), (3, 64)),
        bar=False,
    ),
    Entry(
        "hf-resnet",
        lambda: hf.ResNetForImageClassification(hf.ResNetConfig(**RESNET)),
        image_inputs,
        ((2, 32), (3, 40)),
        bar=False,
    ),
    Entry("clip", _clip, pair_inputs, ((2, 8), (3, 10)), ("padded", "unpadded", "absent"), bar=False),
)
