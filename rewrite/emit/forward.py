"""The forward of a region's module: run the graph that serves the call, or capture one, or step aside."""

from __future__ import annotations

import copy
import inspect
import threading
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from rewrite import calls
from rewrite.capture.intercept import capturing
from rewrite.capture.surroundings import ambient
from rewrite.capture.watch import Watch
from rewrite.emit.ownership import owning
from rewrite.emit.quiet import alone
from rewrite.errors import ModelError
from rewrite.gate import GATE
from rewrite.inputs import in_order
from rewrite.readers import Reader
from rewrite.recompute import nesting
from rewrite.recompute.layers import Owners

if TYPE_CHECKING:
    from rewrite.emit.rewriting import Rewriting
    from rewrite.recompute.layers import Layers
    from rewrite.recompute.plan import Plan

Key = tuple[Hashable, ...]
"""A kind of call: skeleton of the arguments, ambient state, flags."""


@dataclass(frozen=True)
class Variant:
    """Generated code for one kind of call."""

    key: Any
    """The kind, a `Key`."""
    predicate: Callable[[list[Any]], bool]
    predicate_text: str
    questions: tuple[tuple[Callable[..., Any], bool], ...]
    """Yes-or-no questions about the inputs' data, and the answers the code was made for."""
    function: Callable[..., Any]
    result: Hashable
    read: Reader | None
    """The leaves the code uses, read off a call of this kind."""
    children: tuple[Variant, ...]
    """The code that serves the regions this code calls: captured together, they need no second check of inputs."""
    called: Owners
    """These regions' modules, below the root."""
    quiet: bool
    """Whether nothing in the code, or in that of `children`, can change a module on the way."""
    own: Hashable
    """What the region's own attributes held, if the code may have read any that its siblings have otherwise."""

    def serves(self, forward: RegionForward, leaves: list[Any]) -> bool:
        if not self.predicate(leaves) or not forward.owns(self.own):
            return False
        with torch.no_grad():
            return all(bool(question(forward.module, *leaves)) is answer for question, answer in self.questions)

    def run(self, forward: RegionForward, leaves: list[Any]) -> Any:
        if not self.children:
            return calls.join(self.result, self.function(forward.module, *leaves))
        underway, me = [True], threading.get_ident()
        forwards = [vars(module).get("forward") for module in self.called(forward.rewriting.root)]
        undisturbed = self.quiet and forward.undisturbed and alone() and all(map(_is_ours, forwards))
        for child, variant in zip(forwards, self.children, strict=True):
            if isinstance(child, RegionForward):
                looked_up = undisturbed and child.is_as_for(variant)
                child.expected = Expected(variant, underway, me if looked_up else None)
        try:
            return calls.join(self.result, self.function(forward.module, *leaves))
        finally:
            underway[0] = False


class Expected(NamedTuple):
    """Code that the region around, while it runs, knows to serve the next call."""

    variant: Variant
    underway: list[bool]
    """Whether it runs still, and all came as it was captured."""
    looked_up: int | None
    """The thread in which the modules were seen to be as they were, if nothing changes them until the call there."""


class RegionForward:
    """Stands as `forward` in the `__dict__` of a region's module."""

    def __init__(self, module: nn.Module, path: str, rewriting: Rewriting) -> None:
        self.module = module
        self.path = path
        self.rewriting = rewriting
        self.given: Callable[..., Any] | None = vars(module).get("forward")
        """A forward that somebody had put on the instance before."""
        self.table: dict[Key, list[Variant]] = {}
        self.last: tuple[Key, list[Variant]] | None = None
        """The kind of the last call."""
        self.watch: Watch | None = None
        self.expected: Expected | None = None
        self.undisturbed = False
        """Whether the modules of the region were as at the call before this one, and none has hooks."""
        self.layers_by_plan: dict[Plan, Layers] = {}
        """What `rewrite.recompute.layers` remembers of the module."""
        self.__signature__ = inspect.signature(self.original)
        self.__doc__ = self.original.__doc__

    def flags(self) -> Hashable:
        """As `Rewriting.region_flags`, with what to look at found once."""
        last = None if self.watch is None else self.watch.last_state()
        self.undisturbed = last is not None
        if last is not None:
            return last
        if self.watch is None or not self.watch.is_current():
            self.watch = self.rewriting.watch(self.module, self.path)
        return self.watch.state()

    def owns(self, state: Hashable) -> bool:
        """Whether the attributes in which this region differs from its siblings hold these values; None for any."""
        return state is None or (self.watch is not None and self.watch.own.state() == state)

    @property
    def original(self) -> Callable[..., Any]:
        return self.given or types.MethodType(type(self.module).forward, self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if capturing():
            return self.original(*args, **kwargs)
        if self.path == "":
            _check_not_traced()
            kwargs = in_order(kwargs, self.__signature__)
        if self.rewriting.precision is None:
            with GATE:
                return self.run(args, kwargs)
        with GATE, owning(self.rewriting) as outermost:
            if outermost and self.path == "":
                args, kwargs = self.rewriting.entering(args, kwargs)
            return self.run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The region's results, by the code for this kind of call or by the original."""
        expected, self.expected, self.undisturbed = self.expected, None, False
        again = nesting.chosen_before()
        if again is nesting.NOTHING:
            variant, leaves = self.choose(expected, args, kwargs)
        else:
            variant, leaves = again, calls.split((args, kwargs)).leaves
        nesting.remember(variant)
        return self.original(*args, **kwargs) if variant is None else variant.run(self, leaves)

    def choose(
        self, expected: Expected | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Variant | None, list[Any]]:
        """The code for a call, captured now if there is none, and the leaves to run it on; None for the original."""
        if expected is not None and expected.underway[0]:
            variant = expected.variant
            looked_up = expected.looked_up == threading.get_ident()
            if looked_up or self.still_of_kind(variant):
                self.undisturbed |= looked_up
                return variant, variant.read(args, kwargs)  # type: ignore[misc]
            expected.underway[0] = False  # what this region gives may be of another kind too, such as need a gradient
        parts = calls.split((args, kwargs))
        key = (parts.skeleton, ambient(), self.flags())
        found = self.find(key, parts.leaves)
        if found is not None and self.path == "":
            self.rewriting.note_call(parts.leaves)
        return found or self.rewriting.capture_miss(self, args, kwargs, key, parts.leaves), parts.leaves

    def find(self, key: Key, leaves: list[Any]) -> Variant | None:
        """The code for a call, if there is any."""
        return next((variant for variant in self.of_kind(key) if variant.serves(self, leaves)), None)

    def of_kind(self, key: Key) -> list[Variant]:
        """The code for calls of one kind; that of the last kind is known without a hash of what many modules hold."""
        last = self.last  # another thread may put another in its place
        if last is not None and last[0][2] is key[2] and last[0][:2] == key[:2]:
            return last[1]
        found = self.table.get(key)
        if found is None:
            return []
        self.last = (key, found)
        return found

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have code for this kind of call, as the call itself would, without running it."""
        if self.path == "":
            kwargs = in_order(kwargs, self.__signature__)
        if self.rewriting.precision is None:
            self._prepare(args, kwargs)
            return
        with owning(self.rewriting):
            self._prepare(*(self.rewriting.entering(args, kwargs) if self.path == "" else (args, kwargs)))

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parts = calls.split((args, kwargs))
        key = (parts.skeleton, ambient(), self.flags())
        if self.find(key, parts.leaves) is None:
            self.rewriting.capture_miss(self, args, kwargs, key, parts.leaves)

    def still_of_kind(self, variant: Variant) -> bool:
        """Whether a call from the code around, whose inputs were checked there, may run `variant` as it is."""
        _, around, flags_then = variant.key
        if self.module._forward_pre_hooks or ambient() != around or self.flags() != flags_then:
            return False
        return self.owns(variant.own)

    def is_as_for(self, variant: Variant) -> bool:
        """Whether the modules are as at the call before, and as `variant` needs them; no hook runs in them."""
        return self.watch is not None and self.watch.last_state() == variant.key[2] and self.owns(variant.own)

    def add(self, variant: Variant) -> None:
        known = self.table.setdefault(variant.key, [])
        if all(other.predicate_text != variant.predicate_text or other.questions for other in known):
            known.append(variant)

    def forget(self) -> None:
        """Have no code for any call, as before the first."""
        self.table.clear()
        self.last = None

    def count(self) -> int:
        return sum(len(variants) for variants in self.table.values())

    def __getstate__(self) -> dict[str, Any]:
        """Generated code is not pickled: the copy captures again at its first call."""
        return {
            **vars(self),
            "table": {},
            "last": None,
            "layers_by_plan": {},
            "expected": None,
            "watch": None,
            "__signature__": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__signature__ = inspect.signature(self.original)

    def __deepcopy__(self, memo: dict[int, Any]) -> RegionForward:
        """A forward for the copied module, with the code made so far: it takes the module as an argument."""
        made: RegionForward = object.__new__(type(self))
        memo[id(self)] = made
        vars(made).update(vars(self))
        made.module = copy.deepcopy(self.module, memo)
        made.given = copy.deepcopy(self.given, memo)
        made.rewriting = copy.deepcopy(self.rewriting, memo)
        made.table = {key: list(variants) for key, variants in self.table.items()}
        made.watch, made.last, made.layers_by_plan = None, None, {}
        return made

    def bound_to(self, replica: nn.Module) -> RegionForward:
        """The same code for a replica of the module."""
        made: RegionForward = object.__new__(type(self))
        vars(made).update(vars(self))
        made.module, made.watch, made.layers_by_plan = replica, None, {}
        return made


def _is_ours(forward: Any) -> bool:
    return isinstance(forward, RegionForward)


def _check_not_traced() -> None:
    if torch._C._get_tracing_state() is not None:
        raise ModelError(
            "model", "torch.jit.trace cannot look into generated code", "call rewrite.remove(model) first, then trace"
        )
