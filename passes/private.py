"""Private torch names that passes need, each behind a function of our own."""

from __future__ import annotations

import torch


def graph_is_kept() -> bool:
    """Within a backward: whether the graph stays for another one (`retain_graph=True`)."""
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return kept
