"""A storage is attributed to the module, and the generated node, that made it."""

from __future__ import annotations

import linecache
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rewrite.memory import estimate_step


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


X = torch.randn(32, 64)


def test_saved_tensors_name_the_module_that_made_them() -> None:
    saved = {(place.module_path, place.node): place.bytes for place in estimate_step(Stack(), X).saved}

    assert saved == {
        ("blocks.0", "tanh"): 32 * 256 * 4,
        ("blocks.0", "add"): 32 * 64 * 4,
        ("blocks.1", "tanh"): 32 * 256 * 4,
    }


def test_peak_names_its_place_in_the_backward() -> None:
    peak = estimate_step(Stack(), X).peak

    assert peak.phase == "backward"
    assert peak.module_path == "blocks.0.up"  # its gradients come last, when all others are there
    assert peak.largest[0].bytes == 256 * 64 * 4
    assert {held.category for held in peak.largest} >= {"parameter", "gradient"}
    assert peak.bytes == estimate_step(Stack(), X).peak_bytes


def test_recompute_runs_count_as_forward_calls() -> None:
    calls = estimate_step(Stack(recompute=True), X).forward_calls

    assert (calls[""], calls["blocks.0"], calls["blocks.1.down"]) == (1, 2, 2)


def test_gradients_belong_to_their_module() -> None:
    estimate = estimate_step(Stack(), X, optimizer="adamw")
    gradients = [held.module_path for held in estimate.peak.largest if held.category == "gradient"]

    assert set(gradients) <= {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"}
    assert estimate.by_category["gradient"] == sum(p.nbytes for p in Stack().parameters())


def test_generated_lines_name_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def forward(x):\n    t = torch.tanh(x)\n    y = torch.exp(t)\n    return y.sum()\n"
    name = "<generated places test>"
    space: dict[str, object] = {"torch": torch}
    exec(compile(source, name, "exec"), space)
    monkeypatch.setitem(linecache.cache, name, (len(source), None, source.splitlines(True), name))
    runtime = types.ModuleType("rewrite.runtime")
    runtime.SOURCES = {name: (None, None, ("", "tanh_1"), ("", "exp_1"), ("", "output"))}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rewrite.runtime", runtime)
    module = nn.Identity()
    module.forward = space["forward"]  # type: ignore[assignment, method-assign]
    saved = {place.node: place.region for place in estimate_step(module, X.clone().requires_grad_()).saved}

    assert saved == {"tanh_1": "", "exp_1": ""}
