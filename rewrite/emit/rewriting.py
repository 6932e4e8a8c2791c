"""What one optimized model shares: its passes, its structure, and the code made for each kind of call."""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rewrite import calls, pipeline
from rewrite.capture.captured import Captured
from rewrite.capture.driver import Capture, capture_module
from rewrite.capture.structure import Structure, find_blocks, join_path
from rewrite.capture.watch import Watch
from rewrite.contract import Pass, Preparation
from rewrite.emit.code import compile_graph
from rewrite.emit.forward import Key, RegionForward, Variant
from rewrite.emit.held import hold_below
from rewrite.emit.low_weights import lowered
from rewrite.emit.quiet import is_quiet
from rewrite.emit.segments import fold_segments
from rewrite.errors import CaptureError
from rewrite.example import Example
from rewrite.gate import GATE
from rewrite.inputs import as_call, in_order
from rewrite.precision import Precision
from rewrite.program import Opaque, Program, Region
from rewrite.readers import leaf_reader
from rewrite.recompute.layers import owners_at

MAX_VARIANTS = 16
"""Kinds of calls that one region has code for; further kinds run the original forward."""

log = logging.getLogger("rewrite")


class Rewriting:
    """Captures, rewrites and installs code for the regions of `root`."""

    def __init__(self, root: nn.Module, passes: Sequence[Pass], opaque: dict[str, str]) -> None:
        self.root = root
        self.passes = tuple(passes)
        self.given_opaque = dict(opaque)
        self.optimizer: str | None = None
        self.device: str | None = None
        """What a step is counted with when passes plan to a budget; see `Example`."""
        self.choose: Callable[[Program], tuple[Pass, ...]] | None = None
        """What chooses passes behind the given ones, for the first training step that is captured; then None."""
        self.prepared: Mapping[str, Preparation] = {}
        """What the passes did to the modules before the first capture, by their spec texts."""
        self.structure: Structure | None = None
        self.tree: dict[str, int] = {}
        self.missed: RegionForward | None = None
        """The forward whose call has no code yet, while it is captured."""
        self.failed: set[tuple[str, Hashable]] = set()
        self.full: set[str] = set()
        self.without_graph: set[tuple[str, Hashable]] = set()
        """Regions found opaque, with the flags they were captured for: their own forward runs, its blocks have code."""
        self.without_code: dict[str, None] = {}
        """Regions that ran their own forward on fakes, where none can be captured."""
        self.seen_whole = False
        """Whether the passes have seen the whole model once, rather than single blocks of it."""
        self.results: list[pipeline.PipelineResult] = []
        self.settled: dict[Hashable, Any] = {}
        """Plans made for calls of the model, which hold for equal ones: see `Example`."""
        """One for each capture, the first from the example inputs."""
        self.before: list[Program] = []
        self.planned_elements: int | None = None
        """Of the inputs of the largest call that a plan to a budget was made for, or that was warned of."""

    # Precision.

    @property
    def precision(self) -> Precision | None:
        """What the passes have the model compute in, if any of them casts."""
        return next((found for each in self.passes if (found := each.precision()) is not None), None)

    def entering(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the model's call as its weights need them."""
        precision = self.precision
        if precision is None or not precision.low_weights:
            return args, kwargs
        dtype = getattr(torch, precision.dtype)
        return lowered(args, dtype), lowered(kwargs, dtype)

    # Structure.

    def blocks(self) -> Structure:
        """The stacks of the model as it is now: modules may have been replaced, added or taken out."""
        tree = {path: id(module) for path, module in self.root.named_modules()}
        if self.structure is None or tree != self.tree:
            self.structure, self.tree = find_blocks(self.root), tree
        return self.structure

    def watch(self, module: nn.Module, path: str) -> Watch:
        """What a region's code depends on beside the arguments of a call."""
        return Watch(module, path, self.blocks())

    def region_forward(self, path: str) -> RegionForward | None:
        """The forward we put on the module at `path`, if it is there still."""
        try:
            present = vars(self.root.get_submodule(path)).get("forward")
        except AttributeError:
            return None
        return present if isinstance(present, RegionForward) else None

    def region_flags(self, module: nn.Module, path: str) -> Hashable:
        """What the code of a region depends on beside the arguments of a call."""
        return self.watch(module, path).state()

    def install(self, path: str) -> RegionForward:
        """The region forward of the module at `path`, put there if it is not yet."""
        if self.missed is not None and self.missed.path == path:
            return self.missed
        module = self.root.get_submodule(path)
        present = vars(module).get("forward")
        if not isinstance(present, RegionForward):
            present = RegionForward(module, path, self)
            vars(module)["forward"] = present
            vars(module)["_replicate_for_data_parallel"] = Replicate(module)
        return present

    # From a call to code.

    def call(self, example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Example inputs as a call of the model; raises InputError."""
        args, kwargs = as_call(example_inputs)
        return args, in_order(kwargs, inspect.signature(self.root.forward))

    def capture(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
        return capture_module(
            self.root.get_submodule(path), path, self.blocks(), args, kwargs,
            flags=self.region_flags, original_forward=self.original_forward, opaque=self.given_opaque,
        )  # fmt: skip

    def original_forward(self, module: nn.Module) -> Callable[..., Any]:
        """The module's forward as its author, or somebody before us, left it.

        What somebody has wrapped around ours since (accelerate's autocast) is underway when ours misses a call, and is
        not entered again.
        """
        if self.missed is not None and self.missed.module is module:
            return self.missed.original
        present = vars(module).get("forward")
        return present.original if isinstance(present, RegionForward) else module.forward

    def rewrite(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> pipeline.PipelineResult:
        """Capture the module at `path` for this kind of call, apply the passes, and install the code."""
        program = self.program(path, self.capture(path, args, kwargs))
        if self.hold(program):
            program = self.program(path, self.capture(path, args, kwargs))
        trains = path == "" and self.root.training and torch.is_grad_enabled()
        if trains and (self.choose is not None or any(getattr(each, "budget", None) for each in self.passes)):
            self.planned_elements = max(self.planned_elements or 0, _elements(calls.split((args, kwargs)).leaves))
        example = Example(self.root if trains else None, args, kwargs, self.optimizer, self.device, {}, self.settled)
        program = replace(program, metadata={**program.metadata, "example": example})
        try:
            if trains and self.choose is not None:
                given = pipeline.run(program, self.passes).program
                self.passes, self.choose = (*self.passes, *self.choose(given)), None
            result = pipeline.run(program, self.passes)
        finally:
            example.release()
        self.seen_whole |= path == ""
        self.before.append(program)
        self.results.append(result)
        if path in {entry.path for entry in program.opaque}:
            self.without_graph.add((path, self.region_flags(self.root.get_submodule(path), path)))
        self.emit(result.program)
        return result

    def hold(self, program: Program) -> bool:
        """Have the modules in eval mode that the passes say; whether any changed its mode."""
        wanted = {path for each in self.passes for path in each.holds(program)}
        return hold_below(self.root, wanted, [path for region in program.regions for path in region.instances])

    def program(self, path: str, capture: Capture) -> Program:
        taken = {path for captured in capture.regions for path in captured.instances}
        regions = tuple(self.region(captured, taken) for captured in capture.regions)
        blocks = tuple(self.blocks().blocks)
        first = path == "" and not self.seen_whole
        metadata = {"blocks": blocks, "seconds": capture.seconds, "assumptions": capture.assumptions, "first": first,
                    "prepared": self.prepared,
                    "grad": torch.is_grad_enabled()}  # fmt: skip
        return Program(regions, capture.opaque, type(self.root).__name__, metadata)

    def region(self, captured: Captured, taken: set[str]) -> Region:
        """Serve also the siblings that did not run, unless they were captured by themselves."""
        instances = list(captured.instances)
        structure = self.blocks()
        group = structure.blocks.get(captured.path)
        if group is not None and captured.shared:
            flags = Watch(captured.module, captured.path, structure).state()
            likes = [path for path, other in structure.blocks.items() if other == group and path not in taken]
            states = ((path, Watch(self.root.get_submodule(path), path, structure).state()) for path in likes)
            instances += [path for path, state in states if state == flags]
        return Region(
            captured.path, tuple(instances), type(captured.module).__name__, captured.graph,
            written_buffers=captured.written_buffers, mutated_inputs=captured.mutated_inputs, captured=captured,
        )  # fmt: skip

    def emit(self, program: Program) -> None:
        """Generate code for every region and install it on each of its instances; children before their parents."""
        made: dict[str, list[Variant]] = {}
        for region in reversed(program.regions):
            variant = self.variant(region, made)
            for path in region.instances:
                made.setdefault(path, []).append(variant)
                self.install(path).add(variant)

    def variant(self, region: Region, made: dict[str, list[Variant]]) -> Variant:
        captured: Captured = region.captured
        placeholders = [node for node in region.graph.nodes if node.op == "placeholder"]
        used = {place for place, node in enumerate(placeholders) if node.users}
        called = [join_path(region.path, str(node.target)) for node in region.graph.nodes if node.op == "call_module"]
        once = [path for path, times in Counter(called).items() if times == 1 and len(made.get(path, ())) == 1]
        children = [path for path in once if made[path][0].read is not None] if len(region.instances) == 1 else []
        return Variant(
            captured.key,
            captured.predicate,
            captured.predicate_text,
            tuple((compile_graph(graph, region.path), answer) for graph, answer in captured.questions),
            compile_graph(fold_segments(region), region.path),
            captured.result,
            leaf_reader(captured.skeleton, used),
            tuple(made[path][0] for path in children),
            owners_at(tuple(children)),
            is_quiet(region, children) and all(made[path][0].quiet for path in children),
            None if captured.shared else self.watch(captured.module, captured.path).own.state(),
        )

    def capture_miss(
        self, forward: RegionForward, args: tuple[Any, ...], kwargs: dict[str, Any], key: Key, leaves: list[Any]
    ) -> Variant | None:
        """Make code for a kind of call that has none; None if the original forward is to run."""
        if not self._worth_capturing(forward, key, leaves):
            return None
        with GATE.capturing():
            outer, self.missed = self.missed, forward
            try:
                self.rewrite(forward.path, args, kwargs)
            except CaptureError as error:
                log.warning("%s\nThe original forward runs in its place.", error)
            finally:
                self.missed = outer
        variant = forward.find((*key[:2], forward.flags()), leaves)  # modules may be held in eval mode since
        if variant is None:
            self.failed.add((forward.path, key))
        return variant

    def note_call(self, leaves: list[Any]) -> None:
        """Warn of a call of the model that is larger than the ones planned for, and runs by their plan."""
        if self.planned_elements is None or not torch.is_grad_enabled() or any(map(_is_stand_in, leaves)):
            return
        given = _elements(leaves)
        if given > self.planned_elements:
            log.warning(
                "a call whose inputs have %d elements runs by a plan made for %d: its peak may be above the budget\n"
                "Next: plan for the largest call: give it as example_inputs",
                given, self.planned_elements,
            )  # fmt: skip
            self.planned_elements = given

    def _worth_capturing(self, forward: RegionForward, key: Hashable, leaves: list[Any]) -> bool:
        if (forward.path, forward.flags()) in self.without_graph:
            return False
        if (forward.path, key) in self.failed or torch.compiler.is_compiling():
            return False
        if any(map(_is_stand_in, leaves)):
            self.without_code[forward.path] = None
            return False
        holds_cache = not torch.is_grad_enabled() and any(map(calls.is_object, leaves))
        if holds_cache and any(isinstance(leaf, torch.Tensor) and leaf.ndim == 4 for leaf in leaves):
            return False  # a generation step: each one would be a kind of its own
        if forward.count() < MAX_VARIANTS:
            return True
        if forward.path not in self.full:
            self.full.add(forward.path)
            log.warning(
                "region %r: %d kinds of calls have code; further kinds run the original forward",
                forward.path or "root", MAX_VARIANTS,
            )  # fmt: skip
        return False

    @property
    def opaque(self) -> tuple[Opaque, ...]:
        found = {entry.path: entry for program in self.before for entry in program.opaque}
        return tuple(found.values())

    def __getstate__(self) -> dict[str, Any]:
        """Graphs are not pickled; the unpickled model captures again at its first call."""
        nothing: dict[str, Any] = {"failed": set(), "full": set(), "without_graph": set(), "results": [], "before": []}
        return {**vars(self), "structure": None, **nothing}

    def __deepcopy__(self, memo: dict[int, Any]) -> Rewriting:
        made = object.__new__(type(self))
        memo[id(self)] = made
        vars(made).update(vars(self))
        made.root = copy.deepcopy(self.root, memo)
        made.results, made.before, made.settled = list(self.results), list(self.before), dict(self.settled)
        made.failed, made.full, made.without_graph = set(self.failed), set(self.full), set(self.without_graph)
        return made


class Replicate:
    """`_replicate_for_data_parallel` of a region's module: the replica gets a forward of its own.

    `torch.nn.DataParallel` copies the module's `__dict__`, where the forward is bound to the original.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> nn.Module:
        replica: nn.Module = type(self.module)._replicate_for_data_parallel(self.module)
        forward = vars(replica)["forward"]
        vars(replica)["forward"] = forward.bound_to(replica)
        return replica


def _elements(leaves: list[Any]) -> int:
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


def _is_stand_in(leaf: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(leaf, (FakeTensor, torch.fx.Proxy))
