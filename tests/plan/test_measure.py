"""What a choice is predicted to keep and to run again, against runs of the emitted block."""

from __future__ import annotations

import pytest
import torch

import rewrite
from rewrite.example import Example
from rewrite.memory.rates import PEAK_RATES
from rewrite.memory.timeline import Estimate
from rewrite.plan.apply import apply_points
from rewrite.plan.curve import curve
from rewrite.plan.measure import Footprint, measure
from rewrite.plan.outline import Kind, outline
from rewrite.plan.release import releasing
from rewrite.plan.settled import spot_of
from rewrite.plan.stage import staged
from rewrite.plan.trial import try_program
from rewrite.program import value_tensors
from tests.memory.models import MODELS
from tests.plan.models import Stack, tokens

SMALL_BYTES = 64 * 1024
"""Statistics of norms and states of generators; a value of the models below takes eight times as much and more."""


def held_bytes(kind: Kind, footprint: Footprint) -> int:
    """What a run held, with results that no later piece reads, such as what a key-value cache is given."""
    held, tensors = footprint.kept, iter(footprint.holds_results)
    for result, passes in zip(kind.results, kind.passes_on, strict=True):
        for tensor in value_tensors(result):
            if next(tensors) and not passes:
                held += tensor.untyped_storage().nbytes()
    return held


def kinds(model: torch.nn.Module, program: rewrite.Program, device: str = "cpu") -> list[tuple[Kind, list[Footprint]]]:
    with staged(model, device) as stage:
        found = list(outline(program, stage, PEAK_RATES["cpu"]).kinds.values())
        return [
            (kind, [measure(kind, point, stage) for point in curve(kind.profile)]) for kind in found if kind.profile
        ]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_block_keeps_what_was_predicted(device: str) -> None:
    model = Stack(128, 128, width=64)
    for kind, footprints in kinds(model, rewrite.capture(model, tokens(16, 128)), device):
        assert kind.profile is not None
        for point, footprint in zip(curve(kind.profile), footprints, strict=True):
            assert abs(held_bytes(kind, footprint) - point.kept_bytes) <= SMALL_BYTES


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "resnet"])
def test_the_blocks_of_real_architectures_keep_what_was_predicted(name: str) -> None:
    model, inputs = MODELS[name]()
    for kind, footprints in kinds(model, rewrite.capture(model, inputs)):
        assert kind.profile is not None
        for point, footprint in zip(curve(kind.profile), footprints, strict=True):
            assert abs(held_bytes(kind, footprint) - point.kept_bytes) <= SMALL_BYTES


def test_gradients_that_are_there_are_added_to() -> None:
    model = Stack(64, 64, width=64)
    program = rewrite.capture(model, tokens(1, 4))
    with staged(model) as stage:
        block = outline(program, stage, PEAK_RATES["cpu"]).pieces[1].kind
        sizes = {path: 4 * weight.numel() for path, weight in block.module.named_parameters()}
        first = measure(block, None, stage)
        later = measure(block, None, stage, sizes)
        assert all(weight.grad is None for weight in block.module.parameters())

    # The first run's gradients stay, all of them; one at a time of the later run's waits to be added.
    assert later.kept == first.kept
    assert first.backward - later.backward > sum(sizes.values()) - 2 * max(sizes.values()) > 0


def test_the_backward_runs_again_what_was_chosen_and_nothing_else() -> None:
    model, inputs = Stack(128, 128, 128, width=64), tokens()
    program = rewrite.capture(model, inputs)
    example = Example(model, (inputs,))
    before = try_program(program, example)
    with staged(model) as stage:
        pieces = outline(program, stage, PEAK_RATES["cpu"]).pieces
    block = pieces[1].kind
    assert block.profile is not None
    choices = [each for point in curve(block.profile) for each in (point, *releasing(block.profile, point))]
    assert any(point.release for point in choices)
    for point in choices:
        points = [point if piece.kind is block else None for piece in pieces]
        tagged, _ = apply_points(program.copy(), [spot_of(piece) for piece in pieces], points)
        runs = [*point.again, *point.release]
        again = sum(work.flops * work.calls for name in runs for work in block.profile.efforts[name].work)
        blocks = sum(piece.kind is block for piece in pieces)

        assert extra_flops(before, try_program(tagged, example)) == again * blocks


def extra_flops(before: Estimate, after: Estimate) -> int:
    assert before.flops.forward == after.flops.forward
    return after.flops.backward - before.flops.backward
