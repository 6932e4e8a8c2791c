"""The keys in `node.meta` that passes write. Imports no torch, so that passes can be listed without it."""

from __future__ import annotations

RECOMPUTE = "recompute"
"""An int naming the segment whose values are dropped after the forward and computed again in the backward. Nodes of
one graph with the same number form one segment."""

KEEP = "keep"
"""True for a node of a segment whose value is kept rather than computed again, because it might come out differently
(a routing decision with ties)."""

TAGS = (RECOMPUTE, KEEP)
"""Every key through which passes decide; all else in `node.meta` is what capture recorded."""

ORIGIN = "origin"
"""On a node that a pass made: a tuple of the names of the nodes it stands for."""
