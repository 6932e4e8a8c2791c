"""Sizes as symbols: which there are, how a graph computes with them, and which calls it serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from rewrite.capture import private
from rewrite.capture.symbols import Sizes, size_predicate, symbolic_dimensions

IDS = torch.zeros(4, 9, dtype=torch.long)


@pytest.mark.parametrize(
    ("tensors", "level", "expected"),
    [
        ([IDS], 0, [{0, 1}]),
        ([IDS], 1, [{0}]),
        ([IDS], 2, [set()]),
        ([torch.zeros(4, 9, 16)], 0, [{0, 1}]),
        ([torch.zeros(4, 3, 8, 8)], 0, [{0}]),
        ([IDS, torch.zeros(4, 1, 9, 9, dtype=torch.bool)], 0, [{0, 1}, {0, 2, 3}]),
        ([IDS, torch.zeros(4, 1, 9, 9)], 0, [{0, 1}, {0, 2}]),
        ([torch.zeros(())], 0, [set()]),
        ([], 0, []),
    ],
)
def test_batch_and_sequence_become_symbols(tensors: list[torch.Tensor], level: int, expected: list[set[int]]) -> None:
    assert symbolic_dimensions(tensors, level) == expected


class Capture:
    """Fakes of tensors whose every size is a symbol, and what a run relies on."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.mode = private.symbolic_fake_mode()
        self.fakes = [
            private.make_fake(self.mode, torch.ones(*shape), f"input_{index}", set(range(len(shape))))
            for index, shape in enumerate(shapes)
        ]

    def serves(self, *leaves: Any, beside: tuple[Any, ...] = ()) -> bool:
        guards = private.guards(self.mode)  # type: ignore[arg-type]
        conditions = [guard.xreplace(private.replacements(self.mode)) for guard in guards]  # type: ignore[arg-type]
        predicate, text = size_predicate([*self.fakes, *beside], conditions)
        assert eval(f"lambda x: {text}", {"math": __import__("math"), "Max": max, "Min": min})(leaves) == predicate(
            leaves
        )
        return predicate(leaves)


def test_any_sizes_are_served_from_two_on_when_nothing_was_asked() -> None:
    capture = Capture((3, 5))
    assert capture.serves(torch.ones(7, 2))
    assert not capture.serves(torch.ones(1, 5))
    assert not capture.serves(torch.ones(3, 0))


def test_sizes_that_were_equal_must_be_equal() -> None:
    capture = Capture((3, 5), (5, 3))
    assert capture.serves(torch.ones(2, 8), torch.ones(8, 2))
    assert not capture.serves(torch.ones(2, 8), torch.ones(2, 8))


def test_a_relation_that_was_asked_must_hold() -> None:
    capture = Capture((3, 5))
    assert capture.fakes[0].shape[0] < capture.fakes[0].shape[1]
    assert capture.serves(torch.ones(4, 9))
    assert not capture.serves(torch.ones(9, 4))


def test_a_size_found_equal_to_a_number_is_fixed() -> None:
    capture = Capture((3, 5))
    assert capture.fakes[0].shape[0] == 3
    assert capture.serves(torch.ones(3, 9))
    assert not capture.serves(torch.ones(4, 9))


def test_a_divisible_size_must_be_divisible() -> None:
    capture = Capture((6, 5))
    assert capture.fakes[0].shape[0] % 4 == 2
    assert capture.serves(torch.ones(10, 5))
    assert not capture.serves(torch.ones(8, 5))


def test_a_size_made_of_others_must_be_so_again() -> None:
    capture = Capture((3, 5))
    with capture.mode, private.enable_python_dispatcher():
        made = torch.cat([capture.fakes[0], capture.fakes[0]], dim=1)
    capture.fakes.append(made)
    assert capture.serves(torch.ones(2, 4), torch.ones(2, 8))
    assert not capture.serves(torch.ones(2, 4), torch.ones(2, 9))


def test_whole_numbers_of_a_call_are_fixed() -> None:
    capture = Capture((3, 5))
    assert capture.serves(torch.ones(3, 5), 7, beside=(7,))
    assert not capture.serves(torch.ones(3, 5), 8, beside=(7,))


def test_a_relation_between_sizes_that_are_not_shown_serves_the_captured_sizes_only() -> None:
    capture = Capture((3, 5), (7, 9))
    hidden = capture.fakes.pop()
    assert hidden.shape[0] > capture.fakes[0].shape[1]
    assert capture.serves(torch.ones(3, 5))
    assert not capture.serves(torch.ones(3, 6))


def test_sizes_are_written_as_arithmetic_on_the_inputs() -> None:
    capture = Capture((3, 5))
    (tensor,) = capture.fakes
    graph = fx.Graph()
    sizes = Sizes(graph)
    sizes.bind(graph.placeholder("hidden"), tensor)
    rows, columns = tensor.shape
    made = [sizes.write(number) for number in (rows, columns // 2, 2 * rows + columns, rows - rows + 4, rows * 1.0)]
    assert made[3] == 4
    graph.output(made)
    graph.lint()
    assert fx.GraphModule({}, graph)(torch.ones(10, 8)) == [10, 4, 28, 4, 10.0]


def test_one_size_is_read_once() -> None:
    capture = Capture((3, 5))
    graph = fx.Graph()
    sizes = Sizes(graph)
    node = graph.placeholder("hidden")
    sizes.bind(node, capture.fakes[0])
    sizes.bind(node, capture.fakes[0])
    assert sizes.write(capture.fakes[0].shape[0]) is sizes.write(capture.fakes[0].shape[0])
    assert len([node for node in graph.nodes if node.target == "size"]) == 2


def test_a_size_that_no_input_gives_is_an_error() -> None:
    capture = Capture((3, 5), (7, 2))
    graph = fx.Graph()
    sizes = Sizes(graph)
    sizes.bind(graph.placeholder("hidden"), capture.fakes[0])
    with pytest.raises(KeyError, match="is not a size of any input"):
        sizes.write(capture.fakes[1].shape[0] + 1)  # type: ignore[arg-type]
