"""Values that a backward runs twice rather than holds: which may be, and what that saves."""

from __future__ import annotations

from hypothesis import given

import rewrite
from rewrite.memory.rates import PEAK_RATES
from rewrite.plan.curve import curve
from rewrite.plan.measure import measure
from rewrite.plan.outline import Kind, outline
from rewrite.plan.price import Effort
from rewrite.plan.profile import Profile
from rewrite.plan.release import releasing
from rewrite.plan.stage import staged
from tests.bench.vision import unet_like
from tests.plan.test_curve import profiles

SIDE, CHANNELS = 32, 16


@given(profiles())
def test_what_is_released_runs_again_from_what_is_held(profile: Profile) -> None:
    made = {node.name: node for node in profile.nodes}
    profile = Profile(profile.nodes, dict.fromkeys(made, Effort()))
    for point in curve(profile):
        for each in releasing(profile, point):
            assert each.release <= point.again
            assert (each.keep, each.keep_state, each.again) == (point.keep, point.keep_state, point.again)
            assert each.kept_bytes == point.kept_bytes
            assert each.seconds > point.seconds
            for name in each.release:
                assert made[name].needed
                for source in set(made[name].sources) & set(made):
                    assert source in point.keep or (made[source].needed and source not in each.release)


def test_a_block_of_convolutions_holds_one_value_less_for_a_norm_and_two_for_a_convolution() -> None:
    workload = unet_like(channels=(CHANNELS, 32), blocks_per_level=2, side=SIDE)
    program = rewrite.capture(workload.model, workload.inputs)
    with staged(workload.model) as stage:
        kinds = outline(program, stage, PEAK_RATES["cpu"]).kinds.values()
        block = next(each for each in kinds if _is_block(each))
        assert block.profile is not None
        least = curve(block.profile)[0]
        released = {each.release: each for each in releasing(block.profile, least)}
        holding, *going = (measure(block, point, stage).backward for point in (least, *released.values()))
    value = 4 * 32 * SIDE * SIDE
    assert list(released) == [{"norm1"}, {"conv1", "norm1"}, {"conv2", "norm1"}]
    assert [holding - each for each in going] == [value, 2 * value, value]


def _is_block(kind: Kind) -> bool:
    return type(kind.module).__name__ == "ConvBlock" and kind.inputs[0].shape[1:] == (32, SIDE, SIDE)
