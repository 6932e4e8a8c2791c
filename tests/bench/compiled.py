"""torch.compile with the min-cut partitioner and its memory budget, without kernel generation."""

from __future__ import annotations

import torch
import torch._dynamo
import torch._functorch.config

from tests.bench.workload import Workload


def compiled(workload: Workload, budget: str) -> None:
    """Compile the model under an activation memory budget from 0, the least bytes, to 1, the least time.

    The budget is a setting of the process, read when the first step compiles. What was compiled before is forgotten:
    an equal model would be given that, whatever its budget.
    """
    torch._dynamo.reset()
    torch._functorch.config.activation_memory_budget = float(budget)
    workload.run(torch.compile(workload.model, backend="aot_eager_decomp_partition"))
