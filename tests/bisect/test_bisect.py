"""What `rewrite.bisect` finds on real models is enough, and none of it can be left out."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import rewrite
from passes import Checkpoint, MixedPrecision
from rewrite import Change, Numerics, Pass, PassResult, Program
from rewrite.errors import InputError, PassError, VerifyError
from tests.bisect.models import hot_bert, hot_stack
from tests.passes.models import Model, tokens


def logits(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    found: Any = model.eval()(**inputs)
    result: torch.Tensor = getattr(found, "logits", found).detach()
    return result


def far(model: nn.Module, inputs: dict[str, torch.Tensor], keep: Sequence[str]) -> float:
    """How far the logits of a rewrite are off, over their largest."""
    expected = logits(model, inputs)
    small = rewrite.optimize(model, [MixedPrecision(keep_fp32=tuple(keep))], example_inputs=inputs)
    return float((logits(small, inputs) - expected).abs().max() / expected.abs().max())


def test_the_operator_that_overflows_is_found() -> None:
    model, inputs = hot_bert((1,))
    found = rewrite.bisect(model, "mixed-precision,checkpoint", inputs, tolerance=0.01)
    assert found.selectors == ("bert.encoder.layer.1.output.dense",)
    assert found.keep_fp32 == "keep_fp32=[bert.encoder.layer.1.output.dense]"
    assert found.spec == "mixed-precision{keep_fp32=[bert.encoder.layer.1.output.dense]},checkpoint"
    assert found.passes == (MixedPrecision(keep_fp32=found.selectors), Checkpoint())
    assert found.needed
    assert found.minimal
    assert not any(math.isfinite(row.max_abs) for row in found.before)
    assert all(row.passed and row.max_rel < 0.01 for row in found.after)
    assert not math.isfinite(far(model, inputs, ()))
    assert far(model, inputs, found.selectors) < 0.01
    assert found.trials <= 16


def test_operators_alike_in_every_layer_are_one_selector() -> None:
    model, inputs = hot_stack((0, 1, 2))
    found = rewrite.bisect(model, [MixedPrecision()], inputs, tolerance=0.01)
    assert found.selectors == ("blocks.*.down",)
    assert found.kept == ("blocks.0.down", "blocks.1.down", "blocks.2.down")


def test_a_narrow_tolerance_keeps_more_and_none_of_it_can_go() -> None:
    model, inputs = hot_stack((), layers=2)
    tolerance = rewrite.bisect(model, [MixedPrecision()], inputs).before[0].max_rel / 4
    found = rewrite.bisect(model, [MixedPrecision()], inputs, tolerance=tolerance)
    assert 1 < len(found.kept) < len(found.candidates)
    assert far(model, inputs, found.selectors) <= tolerance
    for left_out in found.kept:
        error = far(model, inputs, [path for path in found.kept if path != left_out])
        assert not error <= tolerance, left_out


def test_a_function_in_a_forward_can_be_what_is_kept() -> None:
    model = Model(2)
    with torch.no_grad():
        for part in (model.layers[1].attention.query, model.layers[1].attention.key):
            part.bias.fill_(200.0)
        model.layers[1].attention.key.bias.fill_(200.0)
    found = rewrite.bisect(model, [MixedPrecision()], tokens(), tolerance=1e-2)
    assert found.selectors == ("layers.1.attention.matmul",)


def test_what_the_spec_keeps_already_stays() -> None:
    model, inputs = hot_stack((0, 1))
    found = rewrite.bisect(model, [MixedPrecision(keep_fp32="blocks.0")], inputs, tolerance=0.01)
    assert found.selectors == ("blocks.1.down",)
    assert found.keep_fp32 == "keep_fp32=[blocks.0,blocks.1.down]"


def test_a_model_that_is_near_enough_needs_nothing() -> None:
    model, inputs = hot_stack(())
    found = rewrite.bisect(model, [MixedPrecision(), Checkpoint()], inputs)
    assert (found.selectors, found.kept, found.trials, found.needed) == ((), (), 1, False)
    assert found.keep_fp32 == ""
    assert found.spec == "mixed-precision,checkpoint"
    assert str(found).startswith("nothing needs to be kept in fp32")


def test_fewer_trials_give_what_was_found_by_then() -> None:
    model, inputs = hot_stack((1,))
    found = rewrite.bisect(model, [MixedPrecision()], inputs, tolerance=0.01, max_trials=5)
    assert not found.minimal
    assert far(model, inputs, found.selectors) < 0.01
    assert len(found.kept) > 1


def test_the_model_is_left_as_it_was() -> None:
    model, inputs = hot_stack((1,))
    before, modes = copy.deepcopy(model.state_dict()), [part.training for part in model.modules()]
    stream = torch.get_rng_state()
    rewrite.bisect(model, [MixedPrecision()], inputs, tolerance=0.01)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [part.training for part in model.modules()] == modes
    assert "forward" not in vars(model)
    assert torch.equal(torch.get_rng_state(), stream)


def test_a_pipeline_without_the_option_is_refused() -> None:
    with pytest.raises(PassError, match="no pass has an option keep_fp32") as error:
        rewrite.bisect(*call_with("checkpoint"))
    assert "mixed-precision" in error.value.next_step


def test_two_passes_with_the_option_are_refused() -> None:
    with pytest.raises(PassError, match="2 passes have an option keep_fp32"):
        rewrite.bisect(*call_with("mixed-precision,mixed-precision{level=O2}"))


def test_weights_held_in_half_are_out_of_reach_of_the_option() -> None:
    with pytest.raises(VerifyError, match="the weights themselves are held in float16") as error:
        rewrite.bisect(*call_with("mixed-precision{level=O3}"), tolerance=1e-6)
    assert "a level that holds them in fp32" in error.value.next_step


@dataclass(frozen=True)
class Nudge(Pass):
    """Scales what the last norm gives by a little: no precision undoes that."""

    name: ClassVar[str] = "nudge"
    numerics: ClassVar[Numerics] = Numerics.REASSOCIATED

    def apply(self, program: Program) -> PassResult:
        region = program.regions[-1]
        norm = next(node for node in region.nodes() if node.name.endswith("norm"))
        with region.graph.inserting_after(norm):
            nudged = region.graph.call_function(torch.mul, (norm, 1.0001))
        nudged.meta.update(norm.meta)
        norm.replace_all_uses_with(nudged, delete_user_cb=lambda user: user is not nudged)
        return PassResult(program, True, (Change(region.path, "nudged", region.instances, (norm.name,)),))


def test_other_changes_of_numbers_can_be_out_of_reach() -> None:
    model, inputs = hot_stack(())
    with pytest.raises(VerifyError, match=r"with every operator in fp32 .* allowed") as error:
        rewrite.bisect(model, [MixedPrecision(), Nudge()], inputs, tolerance=1e-12)
    assert "larger tolerance" in error.value.next_step


@pytest.mark.parametrize("tolerance", [0.0, -1.0, math.inf, math.nan])
def test_a_tolerance_is_a_positive_number(tolerance: float) -> None:
    with pytest.raises(InputError, match="is not a positive number"):
        rewrite.bisect(*call_with("mixed-precision"), tolerance=tolerance)


def test_inputs_that_the_model_cannot_run_are_told() -> None:
    model, _ = hot_stack(())
    with pytest.raises(InputError, match="the original module raises on the example inputs"):
        rewrite.bisect(model, "mixed-precision", {"hidden": torch.ones(1, 4)})


def call_with(spec: str) -> tuple[nn.Module, str, dict[str, torch.Tensor]]:
    model, inputs = hot_stack(())
    return model, spec, inputs
