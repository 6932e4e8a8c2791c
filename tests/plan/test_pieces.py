"""Graphs cut at narrow places, and parts of them run by themselves."""

from __future__ import annotations

import itertools

import torch

import rewrite
from rewrite.memory.rates import PEAK_RATES
from rewrite.plan.outline import Outline, outline
from rewrite.plan.pieces import MOST_NODES, narrow_cuts
from rewrite.plan.stage import staged
from tests.plan.models import Bridged, Stack, tokens
from tests.zoo.plain import PLAIN


def outlined(model: torch.nn.Module, inputs: object) -> Outline:
    with staged(model) as stage:
        return outline(rewrite.capture(model, inputs), stage, PEAK_RATES["cpu"])


def body(program: rewrite.Program) -> list[torch.fx.Node]:
    return [node for node in program.regions[0].nodes() if node.op not in ("placeholder", "output")]


def test_a_long_graph_is_cut_where_one_value_passes() -> None:
    nodes = body(rewrite.capture(Bridged(depth=40), torch.randn(8, 48)))
    parts = narrow_cuts(nodes)

    assert [node for part in parts for node in part] == nodes
    assert len(parts) > 1
    assert all(len(part) <= MOST_NODES + 8 for part in parts)
    for part, following in itertools.pairwise(parts):
        later = {node for each in parts[parts.index(following) :] for node in each}
        passing = {node for node in part if set(node.users) & later}
        assert len(passing) <= 2  # the skip from the first layer, and the last value


def test_a_short_graph_is_one_piece() -> None:
    nodes = body(rewrite.capture(Bridged(depth=3), torch.randn(8, 48)))

    assert narrow_cuts(nodes) == [nodes]


def test_blocks_and_what_lies_between_are_pieces_in_the_order_they_run() -> None:
    found = outlined(Stack(64, 64, 64), tokens())

    assert [piece.instance for piece in found.pieces] == ["", "layers.0", "layers.1", "layers.2", ""]
    for number, (piece, following) in enumerate(itertools.pairwise(found.pieces)):
        (value,) = piece.outputs
        assert found.passing[value].maker == number
        assert value in following.inputs
        assert found.passing[value].bytes == 4 * 48 * 32 * 4


def test_a_skip_connection_passes_to_a_piece_further_on() -> None:
    entry = next(entry for entry in PLAIN if entry.name == "plain-unet")
    found = outlined(entry.build(), entry.inputs(*entry.shapes[0]))

    far = [
        value for value in found.passing if value.maker is not None and max(value.readers, default=0) > value.maker + 4
    ]
    assert len(far) >= 2
    assert all(value.grad_bytes == value.bytes for value in far)


def test_runs_of_one_block_are_pieces_of_one_instance() -> None:
    found = outlined(Stack(64, 64, 64, shared=True), tokens())

    assert [piece.instance for piece in found.pieces] == ["", "layers.0", "layers.0", "layers.0", ""]


def test_what_the_model_returns_beside_its_loss_does_not_pass_on() -> None:
    entry = next(entry for entry in PLAIN if entry.name == "plain-unet")
    found = outlined(entry.build(), entry.inputs(*entry.shapes[0]))
    last = found.pieces[-1].kind

    shapes = [tuple(result.shape) for result in last.results]
    assert dict(zip(shapes, last.passes_on, strict=True)) == {(2, 3, 16, 16): False, (): True}
