"""Run what depends on nothing trainable without autograd, once: no recompute runs it again.

Frozen weights need no gradient, so autograd saves nothing for them; what a frozen part still costs is the books that
autograd keeps, and, in a recomputed block, a second run of what lies before the first trained weight.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rewrite import (
    CUT,
    DETACH,
    HELD,
    KEEP,
    KEEP_STATE,
    RECOMPUTE,
    Change,
    Numerics,
    Pass,
    PassError,
    PassResult,
    Refusal,
    parse_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch.fx import Node

    from rewrite import Program, Region

NOTHING = "no frozen weight is read before the first trained one: freeze some first, with rewrite.freeze(model, ...)"


@dataclass(frozen=True)
class DetachFrozen(Pass):
    """Run the frozen part without autograd and never again in the backward."""

    eval_mode: bool = False
    """Hold the modules of the frozen part, and frozen batch norms wherever they are, in eval mode through `train()`:
    their dropout stays off and their statistics stay as they are. Loss and gradients are then those of the model with
    these modules in eval mode, and the random numbers of the rest are others than with their dropout on."""
    cut: bool = False
    """Let gradients end at frozen blocks and modules that run after something trained, which then gets none from
    there. Otherwise such a frozen part is left as it is."""
    cache: str | None = None
    """Keep what the frozen prefix of the model gives for each example, and give it back when the example comes again:
    "memory", or a folder (a text or a Path; ~ is the home folder) for files that later runs, and other processes, find
    too. An example is known by its row of every input; other weights are other keys. Values are those of the batch an
    example first came in: equal up to the order of sums. A batch of one is computed."""
    cache_bytes: str | int = "1GiB"
    """How much may be kept, by all that use the folder; what was used longest ago goes first."""

    name: ClassVar[str] = "detach-frozen"
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def __post_init__(self) -> None:
        if self.cache is None:
            return
        if isinstance(self.cache, os.PathLike):
            object.__setattr__(self, "cache", os.fspath(self.cache))
        if not isinstance(self.cache, str) or not self.cache:
            cause = "cache is neither memory nor a folder"
            raise PassError(f"detach-frozen{{cache={self.cache}}}", cause, "give cache=memory or the name of a folder")
        file = _file_at(self.cache) if self.cache != "memory" else None
        if file is not None:
            raise PassError(f"detach-frozen{{cache={self.cache}}}", f"{file} is a file", "name a folder, there or not")
        _ = self._most_bytes
        object.__setattr__(self, "numerics", Numerics.REASSOCIATED)

    def apply(self, program: Program) -> PassResult:
        """Tag the frozen nodes of every region, and take those that are dear out of recompute segments."""
        if not program.metadata.get("grad", True):
            return PassResult(program, modified=False)
        cut, lost, refusals = self._cuts(program)
        made = [_tag(program, region, nodes, lost) for region, nodes in zip(program.regions, cut, strict=True)]
        changes = [change for change in made if change is not None]
        changes += _held(program) if self.eval_mode else []
        if self.cache is not None:
            cached = self._cached(program)
            changes += [cached] if isinstance(cached, Change) else []
            refusals += [cached] if isinstance(cached, Refusal) else []
        if program.metadata.get("first", True) and not changes and not refusals and not _is_tagged(program):
            refusals.append(Refusal("", NOTHING))
        return PassResult(program, bool(changes), tuple(changes), tuple(refusals))

    def offers(self, program: Program) -> Sequence[Pass]:
        """This pass as it stands, where something is frozen."""
        from passes.frozen_part import FrozenPart

        frozen = any(FrozenPart(program, region).reads_weights() for region in program.regions)
        return (self,) if frozen else ()

    def holds(self, program: Program) -> Collection[str]:
        """The modules of the frozen part, for every instance that runs them."""
        if not self.eval_mode:
            return ()
        from passes.held_modules import held_modules

        found = [(region, path) for region, paths in held_modules(program) for path in paths]
        return {each + path[len(region.path) :] for region, path in found for each in region.instances}

    def _cached(self, program: Program) -> Change | Refusal | None:
        """Have the frozen prefix kept, by a whole model's program; what a single block runs is no prefix."""
        from passes.prefix import cache_prefix
        from passes.prefix_files import Files
        from passes.prefix_store import Memory, Store

        if program.regions and program.regions[0].path:
            return None
        store: Store | None = vars(self).get("_store")
        if store is None:
            most = self._most_bytes
            store = Memory(most) if self.cache == "memory" else Files(str(self.cache), most)
            object.__setattr__(self, "_store", store)
        return cache_prefix(program, store)

    @property
    def _most_bytes(self) -> int:
        """`cache_bytes` as a number; raises PassError for what is none, InputError for a text that is none."""
        most = parse_bytes(self.cache_bytes) if isinstance(self.cache_bytes, str) else self.cache_bytes
        if not isinstance(most, int) or isinstance(most, bool) or most < 0:
            subject = f"detach-frozen{{cache_bytes={self.cache_bytes}}}"
            raise PassError(subject, "it is no number of bytes", "give a whole number from 0 up, or 4GiB")
        return most

    def _cuts(self, program: Program) -> tuple[list[frozenset[Node]], list[str], list[Refusal]]:
        """For each region, nodes at which gradients end; what gets none through them; what is left as it is."""
        from passes.frozen_modules import first_trained, frozen_places, untrained_by

        places = [frozen_places(region) for region in program.regions]
        nowhere = [frozenset[Any]() for _ in places]
        paths = list(dict.fromkeys(path for found in places for path in found))
        if not paths:
            return nowhere, [], []
        more = f", as are {len(paths) - 1} more places," if len(paths) > 1 else ""
        before = first_trained(program) or "an input"
        cause = f"{paths[0]} is frozen{more} and runs after {before}, which needs gradients that go through it"
        if not self.cut:
            reason = f"{cause}: freeze that too, or let gradients end there with cut=True, which leaves it untrained"
            return nowhere, [], [Refusal(paths[0], reason)]
        cut = [frozenset(node for nodes in found.values() for node in nodes) for found in places]
        lost, left = untrained_by(program.regions[0], cut[0])
        if lost and not left:
            return nowhere, [], [Refusal(paths[0], f"{cause}; with gradients ending there nothing would be trained")]
        return cut, lost, []


def _file_at(folder: str) -> Path | None:
    """What is there, at or above the path of a folder, and is no folder."""
    path = Path(folder).expanduser()
    there = next((each for each in (path, *path.parents) if each.exists()), None)
    return None if there is None or there.is_dir() else there


def _tag(program: Program, region: Region, cut: frozenset[Node], lost: Sequence[str]) -> Change | None:
    """Tag the frozen nodes of one region; None where nothing is frozen, or all is as it is to be."""
    from passes.frozen_part import FrozenPart
    from passes.kept_frozen import kept_frozen

    part = FrozenPart(program, region, cut)
    if not part.reads_weights():
        return None
    changed = [node for node in part.nodes if _set(node, DETACH, CUT if node in cut else True)]
    for node in kept_frozen(region):
        if RECOMPUTE in node.meta:
            for tag in (RECOMPUTE, KEEP, KEEP_STATE):
                node.meta.pop(tag, None)
            changed.append(node)
    if not changed:
        return None
    summary = "frozen: runs without autograd, and never again in the backward"
    if cut:
        summary += f"; gradients end here, and {', '.join(lost) or 'nothing that is trained'} gets none through it"
    return Change(region.path, summary, region.instances, tuple(dict.fromkeys(node.name for node in changed)))


def _held(program: Program) -> list[Change]:
    """Tag the nodes of modules that are in eval mode now, and name these modules."""
    from passes.held_modules import held_modules

    changes = []
    for region, found in held_modules(program):
        nodes = [node for run in found.values() for node in run if _set(node, HELD, True)]
        if nodes:
            summary = f"held in eval mode through train(): {', '.join(found)}"
            changes.append(Change(region.path, summary, region.instances, tuple(node.name for node in nodes)))
    return changes


def _set(node: Node, tag: str, value: Any) -> bool:
    """Give a node a tag; whether it is news."""
    news = bool(node.meta.get(tag) != value)
    node.meta[tag] = value
    return news


def _is_tagged(program: Program) -> bool:
    return any(DETACH in node.meta for region in program.regions for node in region.nodes())
