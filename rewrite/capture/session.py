"""One run of a model on fake tensors, during which every region records its graph."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import fx, nn

from rewrite import calls, runtime
from rewrite.capture import private
from rewrite.capture.answers import Answers
from rewrite.capture.captured import Captured, StoppedError, TimeUpError, layer_facts, mark_rereading
from rewrite.capture.descriptions import defined_at, first_line, fresh_like, leaf_names, size_key, tensor_versions
from rewrite.capture.fakes import Fakes
from rewrite.capture.recorder import OpaqueError, Recorder, tensor_version
from rewrite.capture.structure import Structure, has_hooks, is_leaf, join_path, members, path_below
from rewrite.capture.surroundings import ambient, caches_kept, random_states_kept, same_numpy_state
from rewrite.capture.symbols import size_predicate
from rewrite.capture.undo import Undo
from rewrite.capture.watch import Containers

PLAIN_LAYERS = frozenset({
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d,
    nn.BatchNorm2d,
})  # fmt: skip
"""Layers of one operator: called from a module without a graph, they get a graph of their own."""

OWN_FILES = tuple(path.rsplit("/", 1)[0] + "/" for path in (torch.__file__, runtime.__file__) if path)
"""Frames from these folders are torch's or ours, not the user's."""


@dataclass
class Session:
    """State of one run. `opaque` maps the paths of modules that keep their own forward to the reason."""

    root: nn.Module
    root_path: str
    structure: Structure
    opaque_paths: dict[str, OpaqueError]
    flags: Callable[[nn.Module, str], Hashable]
    original_forward: Callable[[nn.Module], Callable[..., Any]]
    level: int = 0
    deadline: float = float("inf")

    def __post_init__(self) -> None:
        self.mode = private.symbolic_fake_mode()
        self.fakes = Fakes(self.mode)
        self.paths: dict[int, list[str]] = {}
        for path, module in self.root.named_modules(remove_duplicate=False):
            self.paths.setdefault(id(module), []).append(join_path(self.root_path, path))
        self.leaf_cache: dict[int, bool] = {}
        self.tensor_names: dict[int, list[str]] = {}
        self.captured: list[Captured | None] = []
        self.started: list[str] = []
        self.entered: Captured | None = None
        """The region that was called last."""
        self.by_group: dict[Hashable, list[Captured]] = {}
        self.stack: list[str] = []
        self.recorder: Recorder | None = None
        self.silent = 0
        self.segments = 0
        self.thread = threading.get_ident()
        self.hidden: dict[tuple[int, str], Any] = {}
        self.read_hidden = False
        self.assumptions: list[str] = []
        self.answers = Answers({})
        self.undo = Undo()
        self.last_place = ("", "")

    # Where we are.

    def module_path(self) -> str:
        return self.stack[-1] if self.stack else self.root_path

    def source(self) -> str:
        """The user's line that is running, as `file.py:12`."""
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if not name.startswith(OWN_FILES):
                return f"{name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    def opaque(self, reason: str) -> OpaqueError:
        return OpaqueError(self.module_path(), reason, self.source())

    def path_of(self, module: nn.Module) -> str | None:
        """The module's path; of a shared module, the one below where we are."""
        found = self.paths.get(id(module))
        if not found:
            return None
        here = self.module_path()
        return next((path for path in found if path_below(path, here)), found[0])

    def is_leaf(self, module: nn.Module) -> bool:
        known = self.leaf_cache.get(id(module))
        if known is None:
            known = self.leaf_cache[id(module)] = is_leaf(module)
        return known

    # The run.

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the root's forward, and every region below it."""
        from rewrite.capture.intercept import interception

        compatible = (private.transformers_sees_real_tensors(), private.transformers_collects_nothing())
        unseen = torch.autograd.graph.saved_tensors_hooks(_same, _same)  # hooks around the call are not for fakes
        with random_states_kept(), caches_kept(), compatible[0], compatible[1], unseen:
            args, kwargs, self.answers = self.fakes.arguments(args, kwargs, self.level)
            held = Containers(list(self.root.modules()))
            try:
                with self.fakes.in_place(self.root, self.root_path, self.tensor_names), interception(self):
                    self.enter_region(self.root, self.root_path, args, kwargs)
            finally:
                held.put_back()
                self.undo.put_back()

    # Regions.

    def enter_region(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `module` as a region of its own: with a graph, unless it is opaque."""
        outer = self.recorder
        if path in self.opaque_paths:
            return self.run_opaque(module, path, args, kwargs)
        group = self.structure.blocks.get(path, ("module", path))
        metadata = self._metadata(module, path, args, kwargs)
        for earlier in self.by_group.get(group, ()):
            if earlier.shared and earlier.likeness == metadata:
                if path not in earlier.instances:
                    earlier.instances.append(path)
                self.entered = earlier
                return self._same_again(earlier, args, kwargs)
        slot = len(self.captured)
        self.captured.append(None)
        self.started.append(path)
        captured, out = self._record_region(module, path, args, kwargs, metadata)
        self.captured[slot] = captured
        self.by_group.setdefault(group, []).append(captured)
        self.recorder = outer
        self.entered = captured
        return out

    def _metadata(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        parts = calls.split((args, kwargs))
        described = [
            (tuple(map(size_key, leaf.shape)), leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else size_key(leaf)
            if isinstance(leaf, (int, torch.SymInt))
            else None
            for leaf in parts.leaves
        ]
        return (parts.skeleton, tuple(described), torch.is_grad_enabled(), self.flags(module, path))

    def _record_region(
        self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], metadata: Hashable
    ) -> tuple[Captured, Any]:
        forward = self.original_forward(module)
        line = defined_at(forward)
        outer, outer_stack, outer_read = self.recorder, self.stack, self.read_hidden
        first_guard = len(private.guards(self.mode))
        buffers = {name: (buffer, tensor_version(buffer)) for name, buffer in module.named_buffers()}
        recorder = Recorder(self, path, args, kwargs, leaf_names(forward, args, kwargs))
        inputs = list(recorder.parts.leaves)
        key = (recorder.parts.skeleton, ambient(), self.flags(module, path))
        skeleton = recorder.parts.skeleton
        if calls.holds_unseen(skeleton):
            raise OpaqueError(path, "it is given an object whose content cannot be seen (a set, a deque, slots)", line)
        self.recorder, self.stack, self.read_hidden = recorder, [path], False
        try:
            held = Containers(members(module, path, self.structure))
            given = (args, kwargs)
            contents = calls.contents(given)
            with self._instance_attributes_watched(module, path), self.no_foreign_random_numbers(line):
                out = forward(*args, **kwargs)
            if held.changed():
                raise OpaqueError(path, "its forward changes a list, dict or set that a module holds", line)
            if calls.contents(given) != contents:
                raise OpaqueError(path, "its forward changes a list, dict or record that it is given", line)
            result = recorder.output(out)
        except (OpaqueError, StoppedError, TimeUpError):
            raise
        except Exception as error:
            place = self.last_place[1] or line
            raise OpaqueError(self.last_place[0] or path, first_line(error), place) from error
        finally:
            read, self.read_hidden = self.read_hidden, outer_read
            self.recorder, self.stack = outer, outer_stack
        written = {
            name for name, (buffer, version) in buffers.items() if tensor_version(buffer) != version
        } | recorder.written
        mark_rereading(recorder.graph, written)
        captured = Captured(
            path=path,
            instances=[path],
            module=module,
            graph=recorder.graph,
            skeleton=skeleton,
            result=result,
            leaves=inputs,
            likeness=metadata,
            key=key,
            conditions=(first_guard, len(private.guards(self.mode))),
            questions=list(recorder.questions),
            written_buffers=tuple(sorted(written)),
            mutated_inputs=recorder.mutated_inputs(),
            shared=not (read or any(map(calls.is_object, inputs)) or _hooked_inside(module)),
            out=out,
        )
        return captured, out

    @contextlib.contextmanager
    def _instance_attributes_watched(self, module: nn.Module, path: str) -> Iterator[None]:
        """Hide the attributes in which this block differs from its siblings; reading one is noticed."""
        group: Hashable = self.structure.blocks.get(path)
        hidden: list[tuple[nn.Module, str, Any]] = []
        differing: set[tuple[str, str]] = set() if group is None else self.structure.differing.get(group, set())
        for below, name in differing:
            owner = module.get_submodule(below)
            if name in vars(owner):
                hidden.append((owner, name, vars(owner).pop(name)))
                self.hidden[id(owner), name] = hidden[-1][2]
        try:
            yield
        finally:
            for owner, name, value in hidden:
                vars(owner).setdefault(name, value)
                self.hidden.pop((id(owner), name), None)

    def _same_again(self, earlier: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a region that repeats an earlier one: fresh fakes of the same description."""
        given = {id(old): new for old, new in zip(earlier.leaves, calls.split((args, kwargs)).leaves, strict=True)}
        self.silent += 1
        try:
            parts = calls.split(earlier.out, opened=False)
            return calls.join(
                parts.skeleton,
                [given.get(id(leaf)) if id(leaf) in given else fresh_like(leaf) for leaf in parts.leaves],
            )
        finally:
            self.silent -= 1

    def run_opaque(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module's own Python; the modules it calls become regions."""
        outer, outer_stack = self.recorder, self.stack
        self.recorder, self.stack = None, [path]
        try:
            with random_states_kept():
                return self.original_forward(module)(*args, **kwargs)
        except (OpaqueError, StoppedError, TimeUpError):
            raise
        except Exception as error:
            raise StoppedError(path, first_line(error)) from error
        finally:
            self.recorder, self.stack = outer, outer_stack

    # Calls of modules, from the interception.

    def call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], proceed: Callable[..., Any]
    ) -> Any:
        path = self.path_of(module)
        if self.silent or path is None:
            return proceed(module, *args, **kwargs)
        out = self._call(module, path, args, kwargs)
        for hook in list(module._forward_hooks.values()):
            if getattr(hook, "__module__", "").startswith("transformers."):
                hook(module, args, out)  # how transformers collects hidden states and router logits: part of the model
        return out

    def _call(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self.recorder
        is_region = path in self.structure.blocks or (has_hooks(module) and not self.is_leaf(module))
        if recorder is None:
            if self.is_leaf(module) and not is_region and type(module) not in PLAIN_LAYERS:
                return self.run_leaf(module, path, args, kwargs)
            return self.enter_region(module, path, args, kwargs)
        if path in self.opaque_paths:
            return self.call_opaque(recorder, module, path, args, kwargs)
        if is_region and self._can_nest(path):
            node = recorder.call_module(path, args, kwargs)
            node.meta.update(hooked=has_hooks(module) or _hooked_inside(module), block=True, random=True)
            self.entered = None
            out = self.enter_region(module, path, args, kwargs)
            self.note_entered(recorder, node)
            recorder.note_buffers(module, path)
            recorder.refresh_objects()
            recorder.finish(node, out, path)
            return out
        if self.is_leaf(module):
            node = recorder.call_module(path, args, kwargs)
            node.meta.update(layer_facts(module))
            versions = tensor_versions(args, kwargs)
            try:
                out = self.run_leaf(module, path, args, kwargs)
            except Exception:
                recorder.graph.erase_node(node)  # the forward may catch it and go on
                raise
            recorder.note_buffers(module, path)
            recorder.note_writes(node, versions)
            recorder.finish(node, out, path)
            return out
        self.stack.append(path)
        try:
            forward = self.original_forward(module)
            with self.no_foreign_random_numbers(defined_at(forward)):
                out = forward(*args, **kwargs)
            if not recorder.knows(out):
                raise self.opaque("it returns a tensor that a region below it made and did not return itself")
            return out
        except BaseException:
            if self.last_place[0] == "":
                self.last_place = (path, self.source())
            raise
        finally:
            self.stack.pop()

    @contextlib.contextmanager
    def no_foreign_random_numbers(self, line: str) -> Iterator[None]:
        """A graph would hold the numbers that Python's or numpy's generator drew during the capture."""
        python, numbers = random.getstate(), numpy.random.get_state()
        yield
        if random.getstate() != python or not same_numpy_state(numpy.random.get_state(), numbers):
            reason = "its forward draws random numbers from Python's or numpy's generator"
            raise OpaqueError(self.module_path(), reason, line)

    def _can_nest(self, path: str) -> bool:
        """A region is not opened inside a block's graph: the block is the unit that passes work on."""
        recorder = self.recorder
        return recorder is None or recorder.path not in self.structure.blocks or path not in self.structure.blocks

    def run_leaf(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.silent += 1
        try:
            return self.original_forward(module)(*args, **kwargs)
        finally:
            self.silent -= 1

    def note_entered(self, recorder: Recorder, node: fx.Node) -> None:
        """Tell the graph around what the region that `node` calls does besides returning its result."""
        if self.entered is not None:
            written = self.entered.written_buffers
            recorder.written.update(join_path(str(node.target), below) for below in written)
            node.meta.update(fills_late=self.entered.fills_late, random=self.entered.random)

    def call_opaque(
        self, recorder: Recorder, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        node = recorder.call_module(path, args, kwargs)
        versions = tensor_versions(args, kwargs)
        out = self.run_opaque(module, path, args, kwargs)
        recorder.note_buffers(module, path)
        recorder.note_writes(node, versions)
        recorder.refresh_objects()
        parts = calls.split(out, opened=False)
        if any(isinstance(leaf, int) for leaf in parts.leaves):
            raise self.opaque(f"it reads what {path!r}, which has no graph, returns beside tensors")
        sizes = [
            tuple(recorder.argument(size) for size in leaf.shape) if isinstance(leaf, torch.Tensor) else None
            for leaf in parts.leaves
        ]
        checked = recorder.graph.call_function(runtime.Expect(parts.skeleton, path), (node, sizes))
        node.meta.update(val=out, module_path=path, source=self.opaque_paths[path].source, fills_late=True)
        recorder.finish(checked, out, path)
        return out

    def unfinished(self) -> list[str]:
        """Regions begun whose recording did not reach its end."""
        return [path for path, captured in zip(self.started, self.captured, strict=True) if captured is None]

    def finish(self) -> list[Captured]:
        """The regions recorded, each with the predicate that says which calls it serves."""
        known = private.replacements(self.mode)
        conditions = [condition.xreplace(known) for condition in private.guards(self.mode)]
        done = [captured for captured in self.captured if captured is not None]
        for captured in done:
            first, last = captured.conditions
            captured.predicate, captured.predicate_text = size_predicate(captured.leaves, conditions[first:last])
        return done


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _hooked_inside(module: nn.Module) -> bool:
    return any(has_hooks(inner) for inner in module.modules() if inner is not module)
