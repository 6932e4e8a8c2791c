"""Hunks of hand-made programs: tags and names decide what changed, instances that changed alike fold."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch import fx

from rewrite.diff.hunks import hunks_between, hunks_of
from rewrite.diff.lines import node_label
from rewrite.diff.model import Hunk
from rewrite.memory.timeline import Estimate, Flops, Peak, SavedAt
from rewrite.program import RECOMPUTE, Program, Region

LAYERS = ("h.0", "h.1", "h.2", "h.3")


def block() -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    up = graph.call_module("up", (x,))
    relu = graph.call_function(torch.relu, (up,))
    graph.output(graph.call_function(operator.add, (x, relu)))
    for node in graph.nodes:
        node.meta |= {"val": torch.empty(2, 8), "module_path": "h.0", "source": "model.py:3"}
    return graph


def program() -> Program:
    root = fx.Graph()
    root.output(root.placeholder("x"))
    return Program((Region("", ("",), "Model", root), Region("h.0", LAYERS, "Block", block())))


def estimate(*saved: SavedAt) -> Estimate:
    total = sum(each.bytes for each in saved)
    return Estimate(total, total, {}, Peak(total, "forward", "", "", ""), {}, (), saved, Flops(0, 0), 0)


def saved(module_path: str, node: str, count: int) -> SavedAt:
    return SavedAt(module_path, node, "h.0", count, (2, 8), "float32")


def marks(hunk: Hunk) -> list[tuple[str, str, str]]:
    return [(line.mark, line.action, line.name) for line in hunk.lines if line.mark != " "]


def test_layers_that_change_alike_are_one_hunk() -> None:
    before, after = program(), program().copy()
    for node in after.regions[1].graph.nodes:
        if node.op.startswith("call"):
            node.meta[RECOMPUTE] = 0
    was = estimate(*(saved(f"{path}.up", "up", 64) for path in LAYERS), *(saved(path, "add", 8) for path in LAYERS))
    now = estimate(*(saved(path, "add", 8) for path in LAYERS))
    root, hunk = hunks_between(before, after, was, now)

    assert not root.changed
    assert hunk.instances == LAYERS
    assert (hunk.before_bytes, hunk.after_bytes, hunk.saved_bytes) == (4 * 72, 4 * 8, 4 * 64)
    assert marks(hunk) == [("-", "keep", "up"), ("+", "recompute", "relu")]
    assert hunk.recomputed_nodes == 3
    assert {line.segment for line in hunk.lines if line.segment is not None} == {0}


def test_layers_split_by_a_pass_are_two_hunks() -> None:
    before = program()
    after, taken = before.split(before.regions[1], LAYERS[:2])
    for node in taken.graph.nodes:
        node.meta[RECOMPUTE] = 0
    every = [saved(path, "relu", 64) for path in LAYERS]
    hunks = hunks_between(before, after, estimate(*every), estimate(*every[2:]))

    assert [(hunk.instances, hunk.changed) for hunk in hunks[1:]] == [(LAYERS[:2], True), (LAYERS[2:], False)]


def test_a_split_layer_keeps_its_labels() -> None:
    before = program()
    for node in before.regions[1].graph.nodes:
        node.meta["module_path"] = "h.0.mlp"
    _, taken = before.split(before.regions[1], LAYERS[2:])

    assert [node_label(taken, node) for node in taken.graph.nodes][2] == "mlp.relu"


def test_layers_that_keep_other_bytes_are_apart() -> None:
    was = estimate(*(saved(path, "relu", 64) for path in LAYERS))
    now = estimate(saved("h.3", "relu", 64))
    _, freed, kept = hunks_between(program(), program(), was, now)

    assert (freed.instances, kept.instances) == (LAYERS[:3], LAYERS[3:])
    assert (freed.changed, kept.changed) == (True, False)


def test_nodes_made_dropped_and_rewired_are_told_by_name() -> None:
    before, after = program(), program().copy()
    graph = after.regions[1].graph
    up, relu, add = (next(node for node in graph.nodes if node.name == name) for name in ("up", "relu", "add"))
    with graph.inserting_after(up):
        half = graph.call_method("half", (up,))
    half.meta["val"] = torch.empty(2, 8, dtype=torch.half)
    relu.replace_all_uses_with(half)
    graph.erase_node(relu)
    hunk = hunks_between(before, after, estimate(saved("h.0", "relu", 64)), estimate())[1]

    assert marks(hunk) == [("+", "cast", half.name), ("-", "drop", "relu"), ("~", "rewire", add.name)]
    assert next(line for line in hunk.lines if line.mark == "+").dtype == "float16"


def test_bytes_of_a_module_without_a_graph_stand_under_its_path() -> None:
    was = estimate(SavedAt("h.0.experts", "aten.mm", "", 64, (4, 4), "float32"))
    hunk = hunks_between(program(), program(), was, estimate())[1]

    (line,) = [line for line in hunk.lines if line.mark == "-"]
    assert (line.label, line.before_bytes, line.after_bytes) == ("experts aten.mm", 64, 0)


@dataclass
class Ran:
    instances: tuple[str, ...]


def test_an_instance_with_two_regions_counts_once() -> None:
    """A first layer whose input needs no gradient has a region of its own that could serve the others too."""
    made = program()
    first = replace(made.regions[1], captured=Ran(LAYERS[:1]))
    rest = replace(first, path="h.1", instances=(*LAYERS[1:], "h.0"), graph=block(), captured=Ran(LAYERS[1:]))
    both = replace(made, regions=(made.regions[0], first, rest))
    hunks = hunks_of(both, estimate(*(saved(path, "relu", 64) for path in LAYERS)))

    (hunk,) = [hunk for hunk in hunks if hunk.class_name == "Block"]
    assert hunk.instances == LAYERS
    assert hunk.after_bytes == 4 * 64
