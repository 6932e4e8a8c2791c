"""Hand-made results, as the library would give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rewrite.contract import Change, Numerics, Pass, PassResult, Refusal
from rewrite.diff.model import GraphDiff, Hunk, NodeLine, PassRecord
from rewrite.memory.timeline import Estimate, Flops, Held, Peak, SavedAt, Work
from rewrite.plan.apply import Kept
from rewrite.plan.document import Plan
from rewrite.plan.fingerprint import Fingerprint
from rewrite.plan.fit import Fit
from rewrite.plan.joint import Priced
from rewrite.program import Opaque, Program
from rewrite.report.fit import FitRow, FitTable

MIB = 2**20
LOGITS = Held(250 * MIB, (2048, 32000), "float32", "saved", "", "cross_entropy")
WEIGHTS = tuple(
    Held(64 * MIB, (4096, 4096), "float32", "parameter", f"model.layers.{layer}.self_attn.o_proj", "")
    for layer in range(3)
)


@dataclass(frozen=True)
class Trimmed(Pass):
    """Does nothing, by name."""

    chunks: int = 1
    select: tuple[str, ...] | None = None

    name: ClassVar[str] = "trimmed"
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED

    def apply(self, program: Program) -> PassResult:
        return PassResult(program, False)


def estimate(peak_bytes: int, saved_bytes: int, flops: int) -> Estimate:
    rest = peak_bytes - saved_bytes
    return Estimate(
        peak_bytes=peak_bytes,
        saved_bytes=saved_bytes,
        by_category={"parameter": rest, "saved": saved_bytes, "gradient": 0},
        peak=Peak(peak_bytes, "backward", "model.layers.0.mlp", "model.layers.0", "mul_3", (LOGITS, *WEIGHTS)),
        phases={"forward": peak_bytes // 2, "backward": peak_bytes},
        curve=(("forward", peak_bytes // 2), ("backward", peak_bytes)),
        saved=(SavedAt("model.layers.0.mlp", "mul_3", "model.layers.0", saved_bytes, (2, 3), "float32"),),
        flops=Flops(flops // 3, flops - flops // 3),
        moved_bytes=10**9,
        work=(Work(flops, 10**9, False, False, 1),),
        device="cuda",
        optimizer="adamw",
        loss="the output's loss",
        assumptions=("the branch on `mask.all()` was taken as false",),
        not_counted=("the CUDA context and kernels (several hundred MiB)", "NCCL buffers"),
    )


def lines() -> tuple[NodeLine, ...]:
    return (
        NodeLine(" ", "", "x", "hidden_states", (1, 2048, 4096), "float32", value_bytes=32 * MIB),
        NodeLine("-", "keep", "q", "self_attn.q_proj", (2048, 4096), "float32", 32 * MIB, 0, "modeling.py:167", 0),
        NodeLine("-", "keep", "r", "input_layernorm.rsqrt", (1, 2048, 1), "float32", 8192, 0, "modeling.py:62", 0),
        NodeLine("-", "keep", "s", "input_layernorm.mean", (1, 2048, 1), "float32", 8192, 0, "modeling.py:61", 0),
        NodeLine("~", "keep", "m", "mlp.gate", (2048, 11008), "bfloat16", 86 * MIB, 43 * MIB, "modeling.py:91", 0),
        NodeLine("+", "add", "c", "to", (2048, 4096), "bfloat16", 0, 16 * MIB),
        NodeLine(" ", "keep", "o", "add", (1, 2048, 4096), "float32", 32 * MIB, 32 * MIB, "modeling.py:320"),
    )


def diff() -> GraphDiff:
    layers = tuple(f"model.layers.{layer}" for layer in range(12))
    per_layer = sum(line.before_bytes for line in lines()), sum(line.after_bytes for line in lines())
    hunk = Hunk(layers[0], layers, "LlamaDecoderLayer", lines(), 12 * per_layer[0], 12 * per_layer[1], 4)
    tail = Hunk("model.norm", ("model.norm",), "Norm", (lines()[5],), 0, 16 * MIB)
    refusal = Refusal(
        "lm_head", "it would save nothing: its input is kept anyway; leave it out of select", "model.py:9"
    )
    record = PassRecord(
        "checkpoint",
        "checkpoint{every=2}",
        "exact",
        True,
        (Change("model.layers.0", "recompute in the backward", layers, ("q", "r")),),
        (refusal,),
        0.25,
    )
    opaque = (
        Opaque("model.layers.0.moe", "it asks for a number: `counts.tolist()`", "moe.py:12"),
        Opaque("model.layers.1.moe", "it asks for a number: `counts.tolist()`", "moe.py:12"),
    )
    before, after = estimate(9000 * MIB, 3000 * MIB, 9 * 10**12), estimate(7100 * MIB, 1200 * MIB, 12 * 10**12)
    return GraphDiff("llama  causal-lm, batch 1", (record,), before, after, (hunk, tail), opaque, 3, "a100")


def plan() -> Plan:
    passes = (Trimmed(chunks=4), Trimmed(chunks=8, select=("model.layers.[0-7]",)))
    points = (
        Priced(9000 * MIB, 1.0, "", ""),
        Priced(8200 * MIB, 0.994, "trimmed{chunks=4}", "trimmed{chunks=4}"),
        Priced(6100 * MIB, 1.31, "trimmed{chunks=4},keep{budget=6396313600}", "trimmed{chunks=4},keep"),
    )
    names = "trimmed{chunks=4},trimmed{chunks=8,select=[model.layers.[0-7]]},keep"
    spec = 'trimmed{chunks=4},trimmed{chunks=8,select=["model.layers.[0-7]"]},keep{budget=7GiB}'
    return Plan(
        model="llama  causal-lm, batch 1",
        passes=passes,
        spec=spec,
        numerics=Numerics.REASSOCIATED,
        budget_bytes=7168 * MIB,
        profile="a100",
        fingerprint=Fingerprint("0123456789abcdef", "fedcba9876543210", ("input_ids int64[1, 512]",)),
        before=estimate(9000 * MIB, 3000 * MIB, 9 * 10**12),
        after=estimate(7100 * MIB, 1200 * MIB, 12 * 10**12),
        chosen=Priced(7100 * MIB, 1.084, spec, names),
        kept=(Kept("model.layers.0", ("model.layers.0",), ("q",), (), ("r",), (), ("q", "r")),),
        frontier=points,
        floor=estimate(6100 * MIB, 200 * MIB, 13 * 10**12),
    )


def fit_table() -> FitTable:
    chunked = "chunk-loss{chunks=8},checkpoint{budget=24GiB}"
    memory = 24 * 1024 * MIB
    rows = (
        FitRow("sequence 512 (95%)", Fit(memory, 9, 41, chunked, 23000 * MIB, 24500 * MIB, 1.21)),
        FitRow("sequence 2048 (100%)", Fit(memory, 0, 9, chunked, 0, 24100 * MIB, 1.22)),
        FitRow("sequence 9000 (100%)", Fit(memory, 0, 0, "", 0, 0, 1.0)),
        FitRow("sequence 8 (5%)", Fit(memory, 64, 64, "", 9 * MIB, 9 * MIB, 1.0)),
    )
    lengths = "lengths.txt: 6 sequences of 8 to 9000; all padded to the longest, 67% of a batch would be padding"
    return FitTable("llama  LlamaForCausalLM", "batch", 24 * 1024 * MIB, "cuda", "adamw", rows, lengths)
