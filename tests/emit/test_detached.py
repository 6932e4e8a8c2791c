"""Runs of nodes without autograd, and when they keep it after all."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from rewrite.emit.code import compile_graph
from rewrite.emit.segments import fold_segments
from rewrite.program import Region
from rewrite.tags import CUT, DETACH, RECOMPUTE
from tests.emit.test_segments import targets


def region(*tags: dict[str, Any], last: str = "sin") -> Region:
    """`last(cos(tanh(x)))` with the given tags."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(4)
    for name, meta in zip(("tanh", "cos", last), tags, strict=True):
        node = graph.call_method(name, (node, *((-1,) if name == "view" else ())))
        node.meta.update({"val": torch.empty(4), **meta})
    graph.output([node])
    return Region("", ("",), "Model", graph)


def run(found: Region, requires_grad: bool) -> torch.Tensor:
    value = torch.linspace(0, 1, 4, requires_grad=requires_grad)
    (result,) = compile_graph(fold_segments(found), "")(nn.Module(), value)
    return result


FROZEN: dict[str, Any] = {DETACH: True}


def test_neighbours_are_one_call() -> None:
    assert targets(fold_segments(region(FROZEN, FROZEN, {}))) == [
        "x", "this_module", "detached_tanh", "getitem", "sin", "output",
    ]  # fmt: skip
    assert targets(fold_segments(region(FROZEN, {}, FROZEN))).count("detached_tanh") == 1
    assert "detached_sin" in targets(fold_segments(region(FROZEN, {}, FROZEN)))


def test_blocks_and_hooks_stand_outside() -> None:
    for apart in ("block", "hooked"):
        names = targets(fold_segments(region(FROZEN, {**FROZEN, apart: True}, FROZEN)))
        assert [name for name in names if name.startswith("detached")] == ["detached_tanh", "detached_sin"]
        assert "cos" in names


def test_a_recompute_segment_has_its_way() -> None:
    names = targets(fold_segments(region({**FROZEN, RECOMPUTE: 0}, {**FROZEN, RECOMPUTE: 0}, {RECOMPUTE: 0})))
    assert "recompute_0" in names
    assert not any(name.startswith("detached") for name in names)


def test_an_input_that_needs_a_gradient_has_it() -> None:
    assert run(region(FROZEN, FROZEN, FROZEN), requires_grad=True).requires_grad
    assert not run(region(FROZEN, FROZEN, FROZEN), requires_grad=False).requires_grad


def test_a_cut_ends_it() -> None:
    cut: dict[str, Any] = {DETACH: CUT}
    assert not run(region(cut, cut, cut), requires_grad=True).requires_grad
    assert not run(region({}, cut, {}), requires_grad=True).requires_grad


def test_a_view_that_leaves_may_be_written_in_place() -> None:
    result = run(region(FROZEN, FROZEN, FROZEN, last="view"), requires_grad=False)
    weight = torch.ones(4, requires_grad=True)
    result += weight
    result.sum().backward()
    assert torch.equal(weight.grad, torch.ones(4))


def test_grad_mode_is_as_before() -> None:
    run(region(FROZEN, FROZEN, {}), requires_grad=False)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        run(region(FROZEN, FROZEN, {}), requires_grad=False)
        assert not torch.is_grad_enabled()
