"""Plans in files: made, loaded, and refused for any other training step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rewrite
from rewrite.errors import InputError, PlanError
from rewrite.plan.fingerprint import fingerprint
from rewrite.report.documents import document_text, plan_document
from tests.plan.joint_models import Language, batch, joint

FACTOR = 6 / 10


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    path.write_text(document_text(plan_document(made())))
    return path


def made() -> rewrite.Plan:
    model = Language()
    return rewrite.plan(model, int(rewrite.estimate(model, batch()).peak_bytes * FACTOR), batch(), optimizer="sgd")


def test_a_loaded_plan_is_the_plan(saved: Path) -> None:
    document = json.loads(saved.read_text())
    planned = rewrite.optimize(Language(), str(saved), example_inputs=batch())

    assert ",".join(map(str, rewrite.report(planned).passes)) == document["spec"]
    assert rewrite.estimate(planned, batch(), optimizer="sgd").peak_bytes == document["after"]["peak_bytes"]


def test_a_plan_is_counted_as_it_was_made_whatever_is_said_now(saved: Path) -> None:
    planned = rewrite.optimize(Language(), str(saved), example_inputs=batch(), optimizer="none")

    after = json.loads(saved.read_text())["after"]["peak_bytes"]
    assert rewrite.estimate(planned, batch(), optimizer="sgd").peak_bytes == after


def test_made_again_it_is_the_same_text(saved: Path) -> None:
    again = made()
    assert document_text(plan_document(again)) == saved.read_text()
    assert str(again).splitlines()[:2] == [f"--- {again.model}", f"+++ {again.spec}"]


def test_a_plan_applies_to_the_first_training_step_and_stays_for_later_shapes(saved: Path) -> None:
    planned = rewrite.optimize(Language(), str(saved))
    planned(batch()).backward()
    planned(batch(2, 32)).backward()

    assert rewrite.report(planned).passes


def frozen() -> Language:
    model = Language()
    model.head.requires_grad_(False)
    return model


class Louder(Language):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * 2


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("model", "inputs", "told"),
    [
        (lambda: Language(layers=4), batch, "the model has other parameters"),
        (frozen, batch, "the model has other parameters"),
        (Louder, batch, "the forward runs other operations"),
        (Language, lambda: batch(3), "it was made with int64[4, 64], and these inputs have int64[3, 64]"),
    ],
)
def test_a_plan_for_another_step_is_refused(
    saved: Path, model: Callable[[], Any], inputs: Callable[[], Any], told: str
) -> None:
    with pytest.raises(PlanError) as raised:
        rewrite.optimize(model(), str(saved), example_inputs=inputs())

    assert told in raised.value.cause
    assert raised.value.exit_code == 2


class Named(Language):
    def forward(self, tokens: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(tokens) * scale + offset


def test_the_order_in_which_inputs_are_named_is_no_part_of_a_step(tmp_path: Path) -> None:
    inputs = {"tokens": batch(), "scale": torch.tensor(2.0), "offset": torch.tensor(1.0)}
    turned = dict(reversed(inputs.items()))
    path = tmp_path / "plan.json"
    budget = int(rewrite.estimate(Named(), inputs).peak_bytes * FACTOR)
    path.write_text(document_text(plan_document(rewrite.plan(Named(), budget, turned))))

    planned = rewrite.optimize(Named(), str(path), example_inputs=inputs)
    calls = vars(planned)["forward"]
    assert torch.equal(planned(**inputs), planned(**turned))
    assert torch.equal(planned(inputs["tokens"], offset=inputs["offset"], scale=inputs["scale"]), planned(**inputs))
    assert calls.count() == 2, "one for names, one for a position"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "it cannot be read: No such file or directory"),
        ("{", "it is not JSON"),
        ("[]", "its schema is None, not 'rewrite/plan/1'"),
        ('{"schema": "rewrite/diff/1"}', "its schema is 'rewrite/diff/1'"),
        ('{"schema": "rewrite/plan/1"}', "it lacks, or has wrong, 'fingerprint'"),
    ],
)
def test_what_is_no_plan_is_told(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(PlanError) as raised:
        rewrite.optimize(Language(), str(path))
    assert told in raised.value.cause


def test_a_plan_with_a_pass_that_is_not_there_is_told(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({**json.loads(saved.read_text()), "spec": "magic"}))

    with pytest.raises(rewrite.SpecError, match="no pass is called 'magic'"):
        rewrite.optimize(Language(), str(path))


def test_a_plan_and_a_budget_together_make_no_sense(saved: Path) -> None:
    with pytest.raises(InputError, match="is a plan to a budget already"):
        rewrite.optimize(Language(), str(saved), budget="1GiB")
    with pytest.raises(InputError, match="is a plan to a budget already"):
        rewrite.plan(Language(), "1GiB", batch(), passes=str(saved))


def test_where_a_model_lies_is_no_part_of_its_fingerprint() -> None:
    with torch.device("meta"):
        there = Language()
    found = [joint(model, batch()) for model in (Language(), there)]
    one, other = (fingerprint(each.program, each.example) for each in found)

    assert one == other
    assert one.difference(other) == ""
