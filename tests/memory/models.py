"""Models large enough that a mebibyte hides nothing: peaks of 20 to 150 MiB."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Built = tuple[nn.Module, dict[str, Any]]


def tokens(batch: int, length: int, vocabulary: int = 1000) -> torch.Tensor:
    return torch.randint(5, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))


def padded(batch: int, length: int) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    return mask


def bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=3, num_attention_heads=4, intermediate_size=1024
    )
    ids = tokens(8, 128)
    return BertForMaskedLM(config), {"input_ids": ids, "attention_mask": padded(8, 128), "labels": ids}


def gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = tokens(4, 128)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=256, n_layer=3, n_head=4, n_positions=128))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    ids = tokens(4, 256)
    return LlamaForCausalLM(config), {"input_ids": ids, "attention_mask": padded(4, 256), "labels": ids}


def mixtral() -> Built:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        use_cache=False,
        output_router_logits=True,
    )
    ids = tokens(4, 256)
    return MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}


def qwen3_moe() -> Built:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    ids = tokens(4, 256)
    return Qwen3MoeForCausalLM(config), {"input_ids": ids, "attention_mask": padded(4, 256), "labels": ids}


def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=1000, d_model=256, d_kv=64, d_ff=1024, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    ids = tokens(4, 128)
    inputs = {"input_ids": ids, "attention_mask": padded(4, 128), "labels": tokens(4, 64), "use_cache": False}
    return T5ForConditionalGeneration(config), inputs


def bart() -> Built:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=1000,
        d_model=256,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        max_position_embeddings=128,
    )
    ids = tokens(4, 128)
    return BartForConditionalGeneration(config), {"input_ids": ids, "labels": tokens(4, 64), "use_cache": False}


def vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=1024,
        image_size=96,
        patch_size=8,
        num_labels=10,
    )
    return ViTForImageClassification(config), {"pixel_values": torch.randn(4, 3, 96, 96), "labels": torch.arange(4)}


def swin() -> Built:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=112, patch_size=4, embed_dim=48, depths=[2, 2], num_heads=[3, 6], window_size=7, num_labels=10
    )
    return SwinForImageClassification(config), {"pixel_values": torch.randn(4, 3, 112, 112), "labels": torch.arange(4)}


def mamba() -> Built:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=1000, hidden_size=128, state_size=8, num_hidden_layers=2, use_cache=False)
    ids = tokens(2, 64)
    return MambaForCausalLM(config), {"input_ids": ids, "labels": ids}


def wav2vec2() -> Built:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=32,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        conv_dim=(64, 64, 64),
        conv_stride=(5, 4, 2),
        conv_kernel=(10, 4, 2),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_length=2,
        layerdrop=0.0,
    )
    return Wav2Vec2ForCTC(config), {"input_values": torch.randn(4, 16000), "labels": torch.randint(1, 32, (4, 8))}


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.body(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(32) for _ in range(3))
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits = self.head(functional.dropout(x.mean((2, 3)), 0.1, self.training))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def resnet() -> Built:
    return ResNet(), {"images": torch.randn(8, 3, 48, 48), "labels": torch.arange(8)}


class Branching(nn.Module):
    """Takes another path, keeps another number of rows, by what is in its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 256)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
        self.head = nn.Linear(256, 1000)

    def forward(self, ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers[: int(keep.sum(-1).min().item()) % 7]:
            x = torch.tanh(layer(x))
        if bool((ids == 3).any()):
            x = torch.exp(x)
        x = x[keep.bool()]
        return functional.cross_entropy(self.head(x), ids[keep.bool()])


def branching() -> Built:
    return Branching(), {"ids": tokens(8, 256), "keep": padded(8, 256)}


MODELS: Mapping[str, Callable[[], Built]] = {
    build.__name__: build
    for build in (
        bert,
        gpt2,
        llama,
        mixtral,
        qwen3_moe,
        t5,
        bart,
        vit,
        swin,
        mamba,
        wav2vec2,
        resnet,
        branching,
    )
}


class Recomputed:
    """A block's forward, recomputed in the backward by stock torch."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(type(self.block).forward, self.block, *args, use_reentrant=False, **kwargs)


def recompute_blocks(model: nn.Module) -> int:
    """Give every element of a list of like blocks a recomputed forward; how many."""
    count = 0
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or len({type(element) for element in module}) != 1:
            continue
        if any(isinstance(element, nn.Conv1d) or hasattr(element, "conv") for element in module):
            continue
        for block in module:
            if list(block.children()):
                block.forward = Recomputed(block)  # type: ignore[method-assign]
                count += 1
    return count
