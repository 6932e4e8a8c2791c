from __future__ import annotations

import pickle

import pytest

from rewrite import errors
from rewrite.errors import RewriteError

ALL = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RewriteError)]


@pytest.mark.parametrize("cls", ALL)
def test_message_has_subject_cause_and_next_step(cls: type[RewriteError]) -> None:
    error = cls("model 'x'", "there is no such file", "check the path")

    assert str(error) == "model 'x': there is no such file\nNext: check the path"


@pytest.mark.parametrize("cls", ALL)
def test_pickles_with_every_part(cls: type[RewriteError]) -> None:
    error = cls("subject", "cause", "next step")

    back = pickle.loads(pickle.dumps(error))

    assert type(back) is cls
    assert (back.subject, back.cause, back.next_step) == ("subject", "cause", "next step")


def test_exit_codes_are_those_of_the_command_line() -> None:
    codes = {cls.__name__: cls.exit_code for cls in ALL}

    assert codes == {
        "RewriteError": 101,
        "BudgetError": 1,
        "PlanError": 2,
        "CaptureError": 2,
        "PassError": 2,
        "PassCrashError": 101,
        "ContractError": 101,
        "SpecError": 2,
        "SelectorError": 2,
        "ModelError": 2,
        "InputError": 2,
        "OptimizerError": 2,
        "VerifyError": 3,
        "RecomputeError": 3,
        "DeferredError": 3,
    }


def test_recompute_error_is_the_runtime_error_eager_autograd_raises() -> None:
    assert issubclass(errors.RecomputeError, RuntimeError)
    assert issubclass(errors.DeferredError, RuntimeError)
