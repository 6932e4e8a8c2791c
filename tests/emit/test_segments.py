"""Segments folded into calls, and the code made of them."""

from __future__ import annotations

import inspect
import linecache
from typing import Any

import pytest
import torch
from torch import fx, nn

from rewrite import runtime
from rewrite.emit.code import compile_graph
from rewrite.emit.segments import fold_segments
from rewrite.errors import ContractError, RecomputeError
from rewrite.program import Region
from rewrite.tags import KEEP, RECOMPUTE


def chain(*tags: int | None, kept: tuple[str, ...] = ()) -> Region:
    """`sin(cos(tanh(exp(x))))` with the given tags, which returns the last value and the second."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(3)
    made = []
    for name, tag in zip(("exp", "tanh", "cos", "sin"), tags, strict=True):
        node = graph.call_method(name, (node,))
        node.meta["val"] = torch.empty(3)
        if tag is not None:
            node.meta[RECOMPUTE] = tag
        if node.name in kept:
            node.meta[KEEP] = True
        made.append(node)
    graph.output([made[3], made[1]])
    return Region("", ("",), "Model", graph)


def targets(graph: fx.Graph) -> list[str]:
    return [getattr(node.target, "__name__", str(node.target)) for node in graph.nodes]


def run(region: Region, module: nn.Module | None = None) -> tuple[Any, torch.Tensor | None]:
    value = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    out = compile_graph(fold_segments(region), "")(module or nn.Module(), value)
    torch.stack([item.sum() for item in out]).sum().backward()
    return [item.detach() for item in out], value.grad


def test_a_graph_without_tags_is_left_as_it_is() -> None:
    region = chain(None, None, None, None)
    assert fold_segments(region) is region.graph


def test_a_segment_is_one_call_with_its_outputs_read_from_it() -> None:
    assert targets(fold_segments(chain(None, 0, 0, None))) == [
        "x", "exp", "this_module", "recompute_0", "getitem", "getitem", "sin", "output",
    ]  # fmt: skip


@pytest.mark.parametrize("tags", [(0, 0, 0, 0), (None, 0, 0, None), (0, None, 1, 1), (0, 1, 2, 3), (5, 5, None, 2)])
def test_values_and_gradients_are_the_same(tags: tuple[int | None, ...]) -> None:
    expected, found = run(chain(None, None, None, None)), run(chain(*tags))
    assert all(map(torch.equal, expected[0], found[0]))
    assert torch.equal(expected[1], found[1])


def test_a_kept_node_is_run_once_and_the_others_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for name in ("exp", "tanh", "cos", "sin"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda value, name=name, original=original: [ran.append(name), original(value)][1]
        )
    expected = run(chain(None, None, None, None))
    ran.clear()
    found = run(chain(0, 0, 0, 0, kept=("tanh",)))
    assert torch.equal(expected[1], found[1])
    assert ran.count("tanh") == 1
    assert ran.count("exp") == 2


def test_a_segment_that_cannot_run_in_one_piece_is_told() -> None:
    with pytest.raises(ContractError) as caught:
        fold_segments(chain(0, None, 0, 0))
    assert "a node outside the segment needs a value of it and gives a value to it" in caught.value.cause
    assert "end the segment before them" in caught.value.next_step


def writing() -> Region:
    """`x.mul_(2)` inside a segment, after a node that saves `x`."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    base = graph.call_method("clone", (value,))
    first = graph.call_method("mul", (base, 3))
    written = graph.call_method("mul_", (base, 2))
    sine = graph.call_method("sin", (written,))
    total = graph.call_method("add", (first, sine))
    content = torch.empty(3)
    for node in graph.nodes:
        node.meta["val"] = torch.empty(3)
    base.meta["val"] = written.meta["val"] = content
    written.meta["writes"] = (base.name,)
    graph.output([total, total])
    for node in (first, written, sine, total):
        node.meta[RECOMPUTE] = 0
    return Region("", ("",), "Model", graph)


def test_an_input_changed_in_place_is_as_it_was_in_the_recompute() -> None:
    plain = writing()
    for node in plain.nodes():
        node.meta.pop(RECOMPUTE, None)
    expected, found = run(plain), run(writing())
    assert torch.equal(expected[1], found[1])


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))


def weighted() -> Region:
    graph = fx.Graph()
    value = graph.placeholder("x")
    weight = graph.get_attr("weight")
    node = graph.call_function(torch.mul, (value, weight))
    last = graph.call_method("sin", (node,))
    for made in (node, last):
        made.meta.update({RECOMPUTE: 0, "val": torch.empty(3)})
    graph.output([last, last])
    return Region("layers.0", ("layers.0",), "Layer", graph)


def test_a_weight_changed_in_place_before_the_backward_is_told() -> None:
    module = Weighted()
    out, _ = compile_graph(fold_segments(weighted()), "layers.0")(module, torch.ones(3, requires_grad=True))
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RecomputeError) as caught:
        out.sum().backward()
    assert str(caught.value) == (
        "recompute of 'layers.0': parameter 'weight' was changed in place between the forward and the backward that "
        "recomputes from it\nNext: call backward before the optimizer step (or before the in-place change), or leave "
        "it out of Checkpoint"
    )


def test_an_input_changed_in_place_before_the_backward_raises() -> None:
    value = torch.ones(3, requires_grad=True).clone()
    out, _ = compile_graph(fold_segments(weighted()), "layers.0")(Weighted(), value)
    with torch.no_grad():
        value.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|was changed in place"):
        out.sum().backward()


def test_each_line_of_generated_code_belongs_to_a_node() -> None:
    region = chain(None, 0, 0, None)
    function = compile_graph(region.graph, "blocks.0")
    name = function.__code__.co_filename
    lines = runtime.SOURCES[name]
    told = {place: linecache.getline(name, number) for number, place in enumerate(lines) if place is not None}
    assert list(told) == [("blocks.0", node) for node in ("exp", "tanh", "cos", "sin")]
    assert all(f"{node} = " in text and f".{node}()" in text for (_, node), text in told.items())
    assert "def forward(module, x" in inspect.getsource(function)


def test_folded_code_traces_to_the_nodes_inside() -> None:
    known = set(runtime.SOURCES)
    compile_graph(fold_segments(chain(None, 0, 0, None)), "")
    found = {place[1] for name in set(runtime.SOURCES) - known for place in runtime.SOURCES[name] if place}
    assert {"exp", "tanh", "cos", "sin"} <= found
