"""The keys in `node.meta` that passes write. Imports no torch, so that passes can be listed without it."""

from __future__ import annotations

RECOMPUTE = "recompute"
"""An int naming the segment whose values are dropped after the forward and computed again in the backward. Nodes of
one graph with the same number form one segment."""

KEEP = "keep"
"""True for a node of a segment whose value is kept rather than computed again: it is dear, or might come out
differently (a routing decision with ties)."""

KEEP_STATE = "keep_state"
"""True for a node of a segment of which is kept what its operator saves for its own backward beside its inputs and
outputs: attention's log-sum-exp, a dropout's mask, a normalisation's statistics."""

RELEASE = "release"
"""True for a node of a segment whose value goes after its first run in a backward and is computed once more where it is
needed next: what it would take between costs more than the run."""

PASSING = "passing"
"""True for the nodes of a segment that calls blocks, of which only what passes between blocks is dropped: it is made
again, by running blocks without recording, when a later block's backward asks for it. What a block needs within it
holds by itself, as its own tags say. A node with `RELEASE` too is made again each time, and not held between."""

DETACH = "detach"
"""True for a node that depends on nothing trainable: it runs without autograd, unless something it is given, or a
weight it reads, needs a gradient after all. `CUT` for one whose inputs need gradients that are to end there. In a
recompute segment the segment has its way."""

CUT = "cut"
"""Value of `DETACH`: without autograd whatever its inputs need."""

WITHIN = "within"
"""On nodes that run as one call, ahead of what uses them: an object that is told how (`rewrite.emit.detached.Around`).
They depend on inputs of the graph and on one another alone."""

HELD = "held"
"""True for a node of a module that is held in eval mode. It tells what was done before the capture."""

STORE = "store"
"""On a node that calls a layer: the bits its frozen weight is stored in. It tells what was done before the capture."""

TAGS = (RECOMPUTE, KEEP, KEEP_STATE, RELEASE, PASSING, DETACH, WITHIN, HELD, STORE)
"""Every key through which passes decide; all else in `node.meta` is what capture recorded."""

ORIGIN = "origin"
"""On a node that a pass made: a tuple of the names of the nodes it stands for."""
