"""The rewrites of this project: any spec text, or a byte budget."""

from __future__ import annotations

import rewrite
from tests.bench.workload import Workload

BUDGET = "budget="


def rewritten(workload: Workload, argument: str) -> None:
    """`rewrite.optimize` with passes (`checkpoint{policy=sqrt}`, empty for none) or a budget (`budget=16MiB`)."""
    if argument.startswith(BUDGET):
        budget = argument.removeprefix(BUDGET)
        module = rewrite.optimize(workload.model, example_inputs=workload.inputs, budget=budget)
    else:
        module = rewrite.optimize(workload.model, argument, example_inputs=workload.inputs)
    workload.run(module)
