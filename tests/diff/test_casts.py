"""Casts in a diff: changes of dtype, with the bytes they write, counted over instances."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import rewrite
from passes import MixedPrecision
from rewrite.diff.model import CastCount, GraphDiff, NodeLine
from rewrite.report.diff import diff_lines, stat_view
from rewrite.report.documents import diff_document

WIDTH, ROWS = 64, 12


class Block(nn.Module):
    """Two products with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(hidden).transpose(0, 1).transpose(0, 1)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@pytest.fixture(scope="module")
def found() -> GraphDiff:
    return rewrite.diff(Stack(), [MixedPrecision()], torch.ones(ROWS, WIDTH))


def lines_of(found: GraphDiff) -> list[NodeLine]:
    return list(itertools.chain.from_iterable(hunk.lines for hunk in found.hunks))


def test_casts_are_counted_with_what_they_write(found: GraphDiff) -> None:
    values, weights = ROWS * WIDTH, WIDTH * WIDTH + WIDTH
    narrow = CastCount("float32", "float16", 6, 6 * 2 * values, 12, 6 * 2 * weights)
    wide = CastCount("float16", "float32", 6, 6 * 4 * values)
    assert sorted(found.casts, key=lambda count: count.to_dtype) == [narrow, wide]
    assert diff_document(found)["stat"]["casts"] == [dataclasses.asdict(count) for count in found.casts]


def test_a_cast_is_a_line_with_both_dtypes(found: GraphDiff) -> None:
    casts = [line for line in lines_of(found) if line.action == "cast" and not line.weight]
    assert {(line.mark, line.was_dtype, line.dtype) for line in casts} == {
        ("+", "float32", "float16"), ("+", "float16", "float32")
    }  # fmt: skip
    text = [line.plain for line in diff_lines(found, 100)]
    assert any(line.startswith("+cast") and "(f32 -> f16)" in line and line.endswith("1.50 KiB") for line in text)
    assert any(line.startswith("+cast") and "(f16 -> f32)" in line and line.endswith("3.00 KiB") for line in text)


def test_weights_and_operators_of_another_dtype_are_told_in_sums(found: GraphDiff) -> None:
    text = [line.plain for line in diff_lines(found, 100)]
    assert sum("4 weights, once a step (f32 -> f16)" in line for line in text) == len(found.hunks)
    assert not any("cast_weight" in line or "up.weight" in line for line in text if line[:1] in "+~")
    full = [line.plain for line in diff_lines(found, 100, full=True) if line.plain[:1] in ("+", "~")]
    assert sum("cast_weight" in line for line in full) == 4 * len(found.hunks)
    assert any(line.startswith("~dtype") and "up.linear (f32 -> f16)" in line for line in full)


def test_stat_counts_them(found: GraphDiff) -> None:
    text = [line.plain for line in stat_view(found, 80)]
    assert "casts      f32 -> f16  +6 a forward, 9.00 KiB" in text
    assert "casts      f32 -> f16  +12 weights once a step, 48.8 KiB" in text
    assert "casts      f16 -> f32  +6 a forward, 18.0 KiB" in text


def test_a_cast_that_a_pass_took_out_counts_against_the_others() -> None:
    class Back(nn.Module):
        """A cast to half and back that is there before."""

        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(hidden).half().float())

    found = rewrite.diff(Back(), [MixedPrecision(fp32_residual=False)], torch.ones(ROWS, WIDTH))
    program = rewrite.report(
        rewrite.optimize(Back(), [MixedPrecision(fp32_residual=False)], example_inputs=torch.ones(ROWS, WIDTH))
    ).after
    assert program is not None
    casts = [node for node in program.regions[0].nodes() if node.target in ("to", "float", "half")]
    assert sum(count.count for count in found.casts) == len(casts) - 2


def test_a_diff_without_casts_says_nothing_of_them() -> None:
    found = rewrite.diff(Stack(), "checkpoint", torch.ones(ROWS, WIDTH))
    assert str(found).splitlines()[:2] == ["--- Stack", "+++ checkpoint"]
    assert found.casts == ()
    assert not any(line.plain.startswith("casts") for line in stat_view(found, 80))
