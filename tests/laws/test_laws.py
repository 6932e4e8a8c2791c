"""Laws over passes, ordered pairs of passes, models, batches and seeds."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import rewrite
from rewrite import pipeline, registry
from rewrite.contract import Numerics
from rewrite.text import program_text
from rewrite.verify import verify
from tests.laws.strategies import QUICK, Subject, alone, batches, parsed, pipelines, subject, subjects
from tests.zoo import ZOO
from tests.zoo.compare import assert_equal, run

# A failing example is small already, and each try is a capture: no shrinking.
PLAIN = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)
QUICKLY = settings(PLAIN, max_examples=8)
AT_LENGTH = settings(PLAIN, max_examples=24)


def declared(passes: list[Any]) -> Numerics:
    """The loosest numerics among `passes`."""
    order = list(Numerics)
    return max((type(pass_).numerics for pass_ in passes), key=order.index, default=Numerics.EXACT)


def numbers_are_kept(found: Subject, data: st.DataObject) -> None:
    inputs = data.draw(batches(found.entry))
    seed = data.draw(st.integers(0, 2**16))
    numerics = declared(found.passes())
    if numerics is not Numerics.EXACT:
        assert verify(found.model, found.small, inputs, seeds=(seed,), numerics=numerics).passed
        return
    for train in (True, False, True):
        assert_equal(run(found.model, inputs, seed, train), run(found.small, inputs, seed, train))


@QUICKLY
@given(subjects(QUICK), st.data())
def test_numbers_are_kept(found: Subject, data: st.DataObject) -> None:
    numbers_are_kept(found, data)


@pytest.mark.sweep
@AT_LENGTH
@given(subjects(tuple(ZOO)), st.data())
def test_numbers_are_kept_over_the_whole_zoo(found: Subject, data: st.DataObject) -> None:
    numbers_are_kept(found, data)


def state_is_kept(found: Subject) -> None:
    model, small = found.model, found.small
    assert list(small.state_dict()) == list(model.state_dict())
    for remove_duplicate in (True, False):
        ours = dict(model.named_parameters(remove_duplicate=remove_duplicate))
        theirs = dict(small.named_parameters(remove_duplicate=remove_duplicate))
        assert list(ours) == list(theirs)
        assert all(theirs[name] is parameter for name, parameter in ours.items())
        assert all(
            dict(small.named_buffers(remove_duplicate=remove_duplicate))[name] is buffer
            for name, buffer in model.named_buffers(remove_duplicate=remove_duplicate)
        )
    assert type(small) is type(model)
    assert [path for path, _ in model.named_modules()] == [path for path, _ in small.named_modules()]
    modules = dict(small.named_modules())
    assert all(type(modules[path]) is type(module) for path, module in model.named_modules())


@pytest.mark.thinned(8)
@pytest.mark.parametrize("name", QUICK)
def test_state_is_kept(name: str) -> None:
    state_is_kept(subject(name, "checkpoint"))


@pytest.mark.sweep
@AT_LENGTH
@given(subjects(tuple(ZOO)))
def test_state_is_kept_over_the_whole_zoo(found: Subject) -> None:
    state_is_kept(found)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything of every module that a rewrite could touch, by path."""
    return {
        path: (
            id(module),
            type(module),
            {name: id(value) for name, value in vars(module).items()},
            type(module).forward,
            {
                name: list(value.items())
                for name, value in vars(module).items()
                if name.endswith("_hooks") or name in ("_parameters", "_buffers", "_modules")
                if hasattr(value, "items")
            },
            module.training,
            [parameter.requires_grad for parameter in module.parameters(recurse=False)],
        )
        for path, module in model.named_modules()
    }


@pytest.mark.thinned(9)
@pytest.mark.parametrize("name", QUICK)
def test_the_original_is_untouched(name: str) -> None:
    entry = ZOO[name]
    model = entry.build()
    handles = [module.register_forward_hook(lambda *_: None) for module in list(model.modules())[:3]]
    inputs = entry.inputs(*entry.shapes[0], entry.masks[0])
    expected = run(model, inputs, seed=1)
    before = snapshot(model)
    small = rewrite.optimize(model, passes=parsed(alone()[0]), example_inputs=inputs)
    run(small, inputs, seed=1)
    after = snapshot(model)
    for path, facts in before.items():
        assert facts == after[path], path
    assert before.keys() == after.keys()
    assert_equal(expected, run(model, inputs, seed=1))
    assert handles


@pytest.mark.thinned(65)
@pytest.mark.parametrize("text", alone())
@pytest.mark.parametrize("name", QUICK)
def test_a_second_time_changes_nothing(name: str, text: str) -> None:
    entry = ZOO[name]
    program = rewrite.capture(entry.build(), entry.inputs(*entry.shapes[0], entry.masks[0]))
    (applied,) = parsed(text)
    before = program_text(program)
    done = pipeline.run(program, [applied, applied])  # type: ignore[list-item]
    assert program_text(program) == before
    first, second = (step.result for step in done.steps)
    assert not second.modified
    assert not second.changes
    assert first.modified == (program_text(first.program) != before)
    assert first.modified == bool(first.changes)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", ["llama", "t5", "plain-unet"])
def test_program_text_is_the_same_every_time(name: str) -> None:
    entry = ZOO[name]
    inputs = entry.inputs(*entry.shapes[0], entry.masks[0])
    model = entry.build()
    text = program_text(rewrite.capture(model, inputs))
    assert program_text(rewrite.capture(model, inputs)) == text
    assert program_text(rewrite.capture(copy.deepcopy(model), inputs)) == text


def test_program_text_is_the_same_in_every_process() -> None:
    script = (
        "import rewrite; from rewrite.text import program_text; from rewrite import pipeline;"
        "from tests.laws.strategies import parsed; from tests.zoo import ZOO;"
        "e = ZOO['bert']; p = rewrite.capture(e.build(), e.inputs(3, 12, 'padded'));"
        "print(program_text(pipeline.run(p, parsed('checkpoint')).program))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**_environment(), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert "recompute=" in texts.pop()


def _environment() -> dict[str, str]:
    import os

    return dict(os.environ)


def test_every_registered_pass_is_under_the_laws() -> None:
    assert "checkpoint" in registry.names()
    assert {text.split("{")[0] for text in alone()} == set(registry.names())
    assert len(pipelines()) == 1 + len(alone()) + len(alone()) ** 2
