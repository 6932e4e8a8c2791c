"""The bar: every architecture, untouched and recomputed, keeps loss and every gradient bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint
from tests.promises.pairs import names
from tests.zoo import BAR, ZOO, Mask
from tests.zoo.compare import assert_equal, run
from tests.zoo.coverage import uncovered

PLANS = {
    "untouched": [],
    "blocks": [Checkpoint(policy="blocks")],
    "sqrt": [Checkpoint(policy="sqrt")],
}
MAY_BE_UNCOVERED = 0.05
QUICK = (
    "bert", "deberta-v2", "gpt2", "llama", "t5", "vit", "plain-resnet", "plain-unet", "plain-branching",
)  # fmt: skip


def check(name: str, plan: str, shapes: int, masks: tuple[Mask, ...]) -> None:
    """Optimize once on the first shape, then train and evaluate on every shape and mask asked for."""
    entry = ZOO[name]
    model = entry.build()
    small = rewrite.optimize(model, passes=PLANS[plan], example_inputs=entry.inputs(*entry.shapes[0], masks[0]))
    assert_captured(model, small)
    for batch, length in entry.shapes[:shapes]:
        for mask in masks:
            inputs = entry.inputs(batch, length, mask)
            for train in (True, False, True):
                assert_equal(run(model, inputs, seed=5, train=train), run(small, inputs, seed=5, train=train))


def assert_captured(model: nn.Module, small: nn.Module) -> None:
    """At most one in twenty modules that hold parameters is neither in a graph nor called from one."""
    program = rewrite.report(small).before
    assert program is not None
    assert program.regions, "the model was refused whole"
    missed = uncovered(model, program)
    holders = sum(1 for module in model.modules() if module._parameters)
    assert len(missed) <= MAY_BE_UNCOVERED * holders, f"{len(missed)} of {holders}: {missed[:5]}; {program.opaque}"


@names(*QUICK, sweep=tuple(name for name in ZOO if name not in QUICK))
def test_one_architecture_recomputed(name: str) -> None:
    check(name, "blocks", 2, ZOO[name].masks[:1])


@pytest.mark.sweep
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ZOO)
def test_every_plan_shape_and_mask(name: str, plan: str) -> None:
    check(name, plan, 2, ZOO[name].masks)


@pytest.mark.thinned(2)
@names("bert", "llama", "plain-unet")
@pytest.mark.parametrize("plan", ["untouched", "sqrt"])
def test_another_plan(name: str, plan: str) -> None:
    check(name, plan, 1, ZOO[name].masks[:2])


@pytest.mark.sweep
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", BAR)
def test_without_example_inputs(name: str, plan: str) -> None:
    entry = ZOO[name]
    model = entry.build()
    small = rewrite.optimize(model, passes=PLANS[plan])
    inputs = entry.inputs(*entry.shapes[1], entry.masks[0])
    assert_equal(run(model, inputs, seed=5), run(small, inputs, seed=5))


@pytest.mark.sweep
@pytest.mark.parametrize("name", BAR)
def test_models_on_the_meta_device_are_captured(name: str) -> None:
    entry = ZOO[name]
    inputs = entry.inputs(*entry.shapes[0], entry.masks[0])
    with torch.device("meta"):
        model: nn.Module = entry.construct().train()
    here = rewrite.capture(entry.build(), inputs)
    there = rewrite.capture(model, inputs)
    assert {region.path for region in there.regions} <= {region.path for region in here.regions}
    assert len(there.regions) > 0
