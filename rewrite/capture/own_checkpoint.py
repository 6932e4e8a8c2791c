"""Parts that a model recomputes by itself, with `torch.utils.checkpoint`: each becomes a recompute segment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import fx

from rewrite import runtime
from rewrite.capture import private
from rewrite.tags import RECOMPUTE

if TYPE_CHECKING:
    from rewrite.capture.session import Session

IN_PIECES = "it recomputes, with torch.utils.checkpoint, a part that brings an object up to date halfway"


def checkpoint_generator(session: Session) -> Callable[..., Any]:
    """What stands in for torch's own: all that is recorded while it is suspended is one segment of the graph."""
    original = getattr(*private.CHECKPOINT_GENERATOR)

    def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        recorder = session.recorder
        if recorder is None or session.silent or recorder.in_segment:
            yield from original(*args, **kwargs)
            return
        session.segments += 1
        number, before, refused = session.segments, len(recorder.graph.nodes), session.opaque(IN_PIECES)
        recorder.in_segment = True
        try:
            yield
        finally:
            recorder.in_segment = False
        if not _tag(list(recorder.graph.nodes)[before:], number):
            raise refused

    return generator


def _tag(nodes: Iterable[fx.Node], number: int) -> bool:
    """Tag `nodes` as one segment, spans of no_grad and autocast included; whether they can be run in one piece.

    Outside stay weights and constants, and what must run once because it changes an object.
    """
    apart: set[fx.Node] = set()
    """Nodes outside that need a value of the segment."""
    for node in nodes:
        inputs = node.all_input_nodes
        if _stays_outside(node):
            if any(source in apart or source.meta.get(RECOMPUTE) == number for source in inputs):
                apart.add(node)
            continue
        if not apart.isdisjoint(inputs):
            return False
        node.meta[RECOMPUTE] = number
    return True


def _stays_outside(node: fx.Node) -> bool:
    changes_object = node.target in (runtime.new_object, runtime.read_leaf) or isinstance(node.target, runtime.Assign)
    return node.op == "get_attr" or changes_object or isinstance(node.target, runtime.Constant)
