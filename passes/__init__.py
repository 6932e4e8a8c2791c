"""The passes that come with the toolkit, one per file. Each depends on the public face of `rewrite` only."""

from __future__ import annotations

from passes.checkpoint import Checkpoint as Checkpoint
from passes.chunk_ffn import ChunkFFN as ChunkFFN
from passes.chunk_loss import ChunkLoss as ChunkLoss
from passes.detach_frozen import DetachFrozen as DetachFrozen
from passes.mixed_precision import MixedPrecision as MixedPrecision
from passes.quantize_frozen import QuantizeFrozen as QuantizeFrozen
from passes.split_gradients import SplitGradients as SplitGradients

__all__ = ["Checkpoint", "ChunkFFN", "ChunkLoss", "DetachFrozen", "MixedPrecision", "QuantizeFrozen", "SplitGradients"]
