"""What tells one captured training step from another: its graphs, its parameters and its inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from rewrite.example import Example
from rewrite.program import Program
from rewrite.text import program_text, value_text

OTHER_GRAPH = "the forward runs other operations, or is given one tensor as two of its inputs"


@dataclass(frozen=True)
class Fingerprint:
    """Equal for steps that run the same operations on the same sizes; the same in every process."""

    graph: str
    """Hash of the text of every graph, in which sizes that vary are symbols."""
    parameters: str
    """Hash of the name, type, shape and need of a gradient of every parameter, and of the buffers."""
    inputs: tuple[str, ...]
    """The example inputs: name, type and shape."""

    def difference(self, other: Fingerprint) -> str:
        """What is other in `other`, as a clause; "" when nothing is."""
        if self.parameters != other.parameters:
            return "the model has other parameters (names, shapes, types, or which need a gradient)"
        if self.inputs != other.inputs:
            missing, more = ([each for each in one if each not in two] for one, two in
                             ((self.inputs, other.inputs), (other.inputs, self.inputs)))  # fmt: skip
            parts = [f"it was made with {', '.join(missing)}" if missing else "",
                     f"these inputs have {', '.join(more)}" if more else ""]  # fmt: skip
            return ", and ".join(filter(None, parts)) or "it was made for the same inputs in another order"
        return "" if self.graph == other.graph else OTHER_GRAPH


def fingerprint(program: Program, example: Example) -> Fingerprint:
    """The fingerprint of a program as captured, from the call it was captured for."""
    assert example.root is not None
    return Fingerprint(_hash(program_text(program)), _hash(_parameters_text(example.root)), _inputs_text(example))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _parameters_text(root: nn.Module) -> str:
    lines = [f"{name} {value_text(each)} {each.requires_grad}" for name, each in root.named_parameters()]
    lines += [f"{name} {value_text(each)}" for name, each in root.named_buffers()]
    return "\n".join(lines)


def _inputs_text(example: Example) -> tuple[str, ...]:
    inputs = example.inputs()
    if isinstance(inputs, Mapping):
        return tuple(f"{name} {_text(value)}" for name, value in sorted(inputs.items()))
    return tuple(_text(value) for value in inputs)


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, (bool, int, float, str)) else value_text(value)
