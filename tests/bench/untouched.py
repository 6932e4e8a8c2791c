"""What a captured graph costs over eager, per training step: `python -m tests.bench.untouched`.

Interleaved runs of the model and of `optimize(model, passes=[])`, process time, one thread; prints the median of ten
ratios for each model. A benchmark, not a test: machines are noisy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import rewrite

SIZE: dict[str, int] = {"vocab_size": 1000}


def models() -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Models whose eager step takes 100 ms or more on one thread, caches and dropout at their defaults."""
    torch.manual_seed(0)
    ids = torch.randint(0, 1000, (4, 128))
    mask = torch.ones_like(ids)
    bert = BertConfig(**SIZE, num_hidden_layers=12, hidden_size=128, num_attention_heads=4, intermediate_size=512)
    llama = LlamaConfig(
        **SIZE, num_hidden_layers=12, hidden_size=128, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=352,
    )  # fmt: skip
    gpt2 = GPT2Config(**SIZE, n_layer=12, n_embd=128, n_head=4)
    labels = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    return {
        "bert": (BertForSequenceClassification(bert), {**labels, "labels": torch.zeros(4, dtype=torch.long)}),
        "llama": (LlamaForCausalLM(llama), labels),
        "gpt2": (GPT2LMHeadModel(gpt2), labels),
    }


def seconds(step: Callable[[], None]) -> float:
    """Process time of one step."""
    started = time.process_time()
    step()
    return time.process_time() - started


def main() -> None:
    """Print, for each model, the eager step and the ratio of the rewritten one to it."""
    torch.set_num_threads(1)
    for name, (model, batch) in models().items():
        model.train()
        untouched = rewrite.optimize(model, passes=[], example_inputs=batch)

        def step(module: nn.Module, inputs: dict[str, Any] = batch) -> None:
            module.zero_grad(set_to_none=True)
            module(**inputs).loss.backward()

        for module in (model, untouched, model, untouched):
            step(module)
        eager, ratios = [], []
        for _ in range(10):
            one = seconds(lambda model=model: step(model))
            other = seconds(lambda untouched=untouched: step(untouched))
            eager.append(one)
            ratios.append(other / one)
        print(
            f"{name}: eager {1000 * statistics.median(eager):.0f} ms, untouched graph x{statistics.median(ratios):.3f}"
        )


if __name__ == "__main__":
    main()
