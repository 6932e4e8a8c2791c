"""Rewrite PyTorch models so that training and serving need less memory, and prove what was done.

The public face. Names load on first use, so that `import rewrite` alone does not import torch.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewrite.api import Report as Report
    from rewrite.api import capture as capture
    from rewrite.api import diff as diff
    from rewrite.api import estimate as estimate
    from rewrite.api import optimize as optimize
    from rewrite.api import remove as remove
    from rewrite.api import report as report
    from rewrite.bisect import Bisection as Bisection
    from rewrite.bisect import bisect as bisect
    from rewrite.certificate import Certificate as Certificate
    from rewrite.contract import Change as Change
    from rewrite.contract import Numerics as Numerics
    from rewrite.contract import Pass as Pass
    from rewrite.contract import PassResult as PassResult
    from rewrite.contract import Preparation as Preparation
    from rewrite.contract import Refusal as Refusal
    from rewrite.deferred import autocast_now as autocast_now
    from rewrite.deferred import defer as defer
    from rewrite.deferred import dropped as dropped
    from rewrite.diff.model import GraphDiff as GraphDiff
    from rewrite.errors import BudgetError as BudgetError
    from rewrite.errors import CaptureError as CaptureError
    from rewrite.errors import ContractError as ContractError
    from rewrite.errors import DeferredError as DeferredError
    from rewrite.errors import InputError as InputError
    from rewrite.errors import ModelError as ModelError
    from rewrite.errors import OptimizerError as OptimizerError
    from rewrite.errors import PassError as PassError
    from rewrite.errors import PlanError as PlanError
    from rewrite.errors import RecomputeError as RecomputeError
    from rewrite.errors import RewriteError as RewriteError
    from rewrite.errors import SelectorError as SelectorError
    from rewrite.errors import SpecError as SpecError
    from rewrite.errors import VerifyError as VerifyError
    from rewrite.freezing import Frozen as Frozen
    from rewrite.freezing import freeze as freeze
    from rewrite.memory.timeline import Estimate as Estimate
    from rewrite.operators import operator_name as operator_name
    from rewrite.operators import operator_path as operator_path
    from rewrite.optim.build import optimizer as optimizer
    from rewrite.optim.convert import convert_optimizer_state as convert_optimizer_state
    from rewrite.plan.apply import Kept as Kept
    from rewrite.plan.document import Plan as Plan
    from rewrite.plan.fit import Fit as Fit
    from rewrite.plan.search import KeepPlan as KeepPlan
    from rewrite.plan.search import plan_keep as plan_keep
    from rewrite.planning import find_batch as find_batch
    from rewrite.planning import fit as fit
    from rewrite.planning import plan as plan
    from rewrite.precision import Precision as Precision
    from rewrite.program import Opaque as Opaque
    from rewrite.program import Program as Program
    from rewrite.program import Region as Region
    from rewrite.ranges import ranges as ranges
    from rewrite.report.sizes import parse_bytes as parse_bytes
    from rewrite.report.sizes import size_text as size_text
    from rewrite.scaling import full_precision as full_precision
    from rewrite.scaling import loss_scaler as loss_scaler
    from rewrite.selectors import matches as matches
    from rewrite.tags import CUT as CUT
    from rewrite.tags import DETACH as DETACH
    from rewrite.tags import HELD as HELD
    from rewrite.tags import KEEP as KEEP
    from rewrite.tags import KEEP_STATE as KEEP_STATE
    from rewrite.tags import ORIGIN as ORIGIN
    from rewrite.tags import RECOMPUTE as RECOMPUTE
    from rewrite.tags import RELEASE as RELEASE
    from rewrite.tags import STORE as STORE
    from rewrite.tags import WITHIN as WITHIN
    from rewrite.value_range import Ranges as Ranges
    from rewrite.verify import verify as verify
    from rewrite.weight_casts import cast_weight as cast_weight
    from rewrite.weight_casts import projections as projections

_HOMES = {
    "rewrite.api": ("Report", "capture", "diff", "estimate", "optimize", "remove", "report"),
    "rewrite.bisect": ("Bisection", "bisect"),
    "rewrite.certificate": ("Certificate",),
    "rewrite.contract": ("Change", "Numerics", "Pass", "PassResult", "Preparation", "Refusal"),
    "rewrite.errors": (
        "BudgetError", "CaptureError", "ContractError", "DeferredError", "InputError", "ModelError",
        "OptimizerError", "PassError", "PlanError", "RecomputeError", "RewriteError", "SelectorError", "SpecError",
        "VerifyError",
    ),
    "rewrite.deferred": ("autocast_now", "defer", "dropped"),
    "rewrite.diff.model": ("GraphDiff",),
    "rewrite.freezing": ("Frozen", "freeze"),
    "rewrite.memory.timeline": ("Estimate",),
    "rewrite.operators": ("operator_name", "operator_path"),
    "rewrite.optim.build": ("optimizer",),
    "rewrite.optim.convert": ("convert_optimizer_state",),
    "rewrite.precision": ("Precision",),
    "rewrite.scaling": ("full_precision", "loss_scaler"),
    "rewrite.weight_casts": ("cast_weight", "projections"),
    "rewrite.plan.apply": ("Kept",),
    "rewrite.plan.document": ("Plan",),
    "rewrite.plan.fit": ("Fit",),
    "rewrite.planning": ("find_batch", "fit", "plan"),
    "rewrite.plan.search": ("KeepPlan", "plan_keep"),
    "rewrite.program": ("Opaque", "Program", "Region"),
    "rewrite.ranges": ("ranges",),
    "rewrite.report.sizes": ("parse_bytes", "size_text"),
    "rewrite.selectors": ("matches",),
    "rewrite.tags": (
        "CUT", "DETACH", "HELD", "KEEP", "KEEP_STATE", "ORIGIN", "RECOMPUTE", "RELEASE", "STORE", "WITHIN",
    ),
    "rewrite.value_range": ("Ranges",),
    "rewrite.verify": ("verify",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'rewrite' has no attribute {name!r}")
    module = importlib.import_module(home)
    globals().update({sibling: getattr(module, sibling) for sibling in _HOMES[home]})
    return globals()[name]


class _Face(types.ModuleType):
    """The package itself: a submodule that is imported does not hide the function of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOME_OF or not isinstance(value, types.ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
