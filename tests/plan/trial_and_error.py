"""Whether a step of a batch fits a hard limit of memory: `python -m tests.plan.trial_and_error MODEL BATCH BYTES`.

Exit 0 when it does and 1 when the allocator is refused. The limit is on what the process maps for data, counted from
before the model is built.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path

import torch
from torch import nn

SEQUENCE = 128


def build(name: str) -> nn.Module:
    """A small language model of transformers, in train mode, without dropout."""
    import transformers

    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=2000, n_embd=128, n_layer=4, n_head=4, n_positions=256,
            embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            vocab_size=8000, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
            max_position_embeddings=256,
        )  # fmt: skip
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model.train()


def inputs(batch: int) -> dict[str, torch.Tensor | bool]:
    """A training batch of `SEQUENCE` tokens each."""
    ids = torch.randint(0, 2000, (batch, SEQUENCE), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def data_bytes() -> int:
    """What this process has mapped for data."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def main() -> int:
    name, batch, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    small = build(name)
    small(**inputs(1)).loss.backward()  # libraries take what they take once
    del small
    started = data_bytes()
    model, given = build(name), inputs(batch)
    model.zero_grad(set_to_none=True)
    resource.setrlimit(resource.RLIMIT_DATA, (started + memory, started + memory))
    try:
        model(**given).loss.backward()
    except (RuntimeError, MemoryError):
        return 1
    return 0


if __name__ == "__main__":
    os._exit(main())  # nothing may be allocated any more, not even to clean up
