"""One run of a model on fake tensors, during which every region records its graph."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import fx, nn

from rewrite import calls, runtime
from rewrite.capture import private
from rewrite.capture.answers import SCALAR_QUESTIONS, SIZE_QUESTIONS, Answers
from rewrite.capture.questions import ask_inputs, guess
from rewrite.capture.recorder import OpaqueError, Recorder
from rewrite.capture.structure import Structure, has_hooks, is_leaf, join_path, path_below
from rewrite.capture.symbols import Predicate, size_predicate, symbolic_dimensions

SILENT = frozenset(
    "size dim numel stride is_floating_point is_contiguous __len__ element_size is_complex ndimension get_device "
    "untyped_storage storage_offset __hash__ __repr__ __format__ is_tensor data_ptr type_as_dtype is_signed "
    "_is_view __reduce_ex__ is_set_to _version __dir__ is_shared is_pinned".split()
)
"""Functions that only look at a tensor's description: run, never recorded."""


PLAIN_LAYERS = frozenset(
    {nn.Linear, nn.Embedding, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d}
)
"""Layers of one operator: called from a module without a graph, they get a graph of their own."""


class TimeUpError(Exception):
    """The capture took longer than it may."""


class StoppedError(Exception):
    """A module without a graph could not be run on fakes either; what comes after it was not reached."""


@dataclass
class Captured:
    """One region's graph, and the calls it may serve."""

    path: str
    instances: list[str]
    module: nn.Module
    graph: fx.Graph
    skeleton: Hashable
    result: Any
    """Skeleton of what the region returns."""
    leaves: list[Any]
    likeness: Hashable
    """What a call of a sibling must share to be served by this graph without a run."""
    key: Hashable
    """What a later call must share; with `predicate` and `questions` it decides whether the graph serves."""
    conditions: tuple[int, int] = (0, 0)
    questions: list[tuple[fx.Graph, bool]] = field(default_factory=list)
    written_buffers: tuple[str, ...] = ()
    mutated_inputs: tuple[str, ...] = ()
    shared: bool = True
    """Whether the graph read nothing that differs between the elements of its stack."""
    out: Any = None
    predicate: Predicate = bool
    predicate_text: str = ""


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
        self.paths: dict[int, list[str]] = {}
        for path, module in self.root.named_modules(remove_duplicate=False):
            self.paths.setdefault(id(module), []).append(join_path(self.root_path, path))
        self.leaf_cache: dict[int, bool] = {}
        self.tensor_names: dict[int, list[str]] = {}
        self.captured: list[Captured | None] = []
        self.started: list[str] = []
        self.written_below: tuple[str, ...] = ()
        self.by_group: dict[Hashable, list[Captured]] = {}
        self.stack: list[str] = []
        self.recorder: Recorder | None = None
        self.silent = 0
        self.segments = 0
        self.hidden: dict[tuple[int, str], Any] = {}
        self.read_hidden = False
        self.assumptions: list[str] = []
        self.answers = Answers({})
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
        with random_states_kept(), compatible[0], compatible[1]:
            args, kwargs = self._fake_arguments(args, kwargs)
            with self._fake_tensors(), interception(self):
                self.enter_region(self.root, self.root_path, args, kwargs)

    def _fake_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        parts = calls.split((args, kwargs))
        tensors = [leaf for leaf in parts.leaves if isinstance(leaf, torch.Tensor)]
        dimensions = iter(symbolic_dimensions(tensors, self.level))
        leaves, real = [], {}
        for index, leaf in enumerate(parts.leaves):
            if not isinstance(leaf, torch.Tensor):
                leaves.append(leaf)
                continue
            fake = self._fake_input(leaf, index, next(dimensions))
            leaves.append(fake)
            real[id(fake)] = leaf
        self.answers = Answers(real)
        self.inputs = leaves
        faked: tuple[tuple[Any, ...], dict[str, Any]] = calls.rebuild(parts.skeleton, leaves)
        return faked

    def _fake_input(self, tensor: torch.Tensor, index: int, dynamic: set[int]) -> torch.Tensor:
        plain = tensor.detach()
        if plain.is_meta:
            plain = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype)
        fake = private.make_fake(self.mode, plain, f"input_{index}", dynamic)
        return fake.requires_grad_(tensor.requires_grad)

    @contextlib.contextmanager
    def _fake_tensors(self) -> Iterator[None]:
        """Put fakes in place of every parameter and buffer, and everything back as it was at the end."""
        fakes: dict[int, torch.Tensor] = {}
        owners = [module for module in self.root.modules()]
        kept = [Kept(vars(owner)) for owner in [*owners, *_configs(self.root)]]
        originals = {id(module): {**module._parameters, **module._buffers} for module in owners}
        for path, module in self.root.named_modules(remove_duplicate=False):
            for name, tensor in originals[id(module)].items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    fakes[id(tensor)] = self._fake_state(tensor)
                table: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
                table[name] = fakes[id(tensor)]
                full = join_path(join_path(self.root_path, path), name)
                self.tensor_names.setdefault(id(fakes[id(tensor)]), []).append(full)
        try:
            yield
        finally:
            for content in kept:
                content.restore()

    def _fake_state(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta or type(tensor).__name__ == "DTensor":
            device = "cpu" if tensor.is_meta else tensor.device
            with self.mode:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        else:
            fake = private.make_fake(self.mode, tensor.detach(), "state", set())
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)

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
                self.written_below = earlier.written_buffers
                return self._same_again(earlier, args, kwargs)
        slot = len(self.captured)
        self.captured.append(None)
        self.started.append(path)
        captured, out = self._record_region(module, path, args, kwargs, metadata)
        self.captured[slot] = captured
        self.by_group.setdefault(group, []).append(captured)
        self.recorder = outer
        self.written_below = captured.written_buffers
        return out

    def _metadata(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        parts = calls.split((args, kwargs))
        described = [
            (tuple(map(_size_key, leaf.shape)), leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else _size_key(leaf) if isinstance(leaf, (int, torch.SymInt)) else None
            for leaf in parts.leaves
        ]
        return (parts.skeleton, tuple(described), torch.is_grad_enabled(), self.flags(module, path))

    def _record_region(
        self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], metadata: Hashable
    ) -> tuple[Captured, Any]:
        forward = self.original_forward(module)
        outer, outer_stack, outer_read = self.recorder, self.stack, self.read_hidden
        first_guard = len(private.guards(self.mode.shape_env))
        buffers = {name: (buffer, buffer._version) for name, buffer in module.named_buffers()}
        recorder = Recorder(self, path, args, kwargs, leaf_names(forward, args, kwargs))
        inputs = list(recorder.parts.leaves)
        key = (recorder.parts.skeleton, ambient(), self.flags(module, path))
        skeleton = recorder.parts.skeleton
        self.recorder, self.stack, self.read_hidden = recorder, [path], False
        try:
            with self._instance_attributes_watched(module, path), self.no_foreign_random_numbers():
                out = forward(*args, **kwargs)
            result = recorder.output(out)
        except (OpaqueError, StoppedError, TimeUpError):
            raise
        except Exception as error:
            raise OpaqueError(self.last_place[0] or path, _sentence(error), self.last_place[1]) from error
        finally:
            read, self.read_hidden = self.read_hidden, outer_read
            self.recorder, self.stack = outer, outer_stack
        written = {name for name, (buffer, version) in buffers.items() if buffer._version != version} | recorder.written
        captured = Captured(
            path, [path], module, recorder.graph, skeleton, result, inputs, metadata, key,
            conditions=(first_guard, len(private.guards(self.mode.shape_env))),
            questions=list(recorder.questions), written_buffers=tuple(sorted(written)),
            mutated_inputs=recorder.mutated_inputs(), shared=not read and not any(map(calls.is_object, inputs)) and not _hooked_inside(module), out=out,
        )  # fmt: skip
        return captured, out

    @contextlib.contextmanager
    def _instance_attributes_watched(self, module: nn.Module, path: str) -> Iterator[None]:
        """Hide the attributes in which this block differs from its siblings; reading one is noticed."""
        group = self.structure.blocks.get(path)
        hidden: list[tuple[nn.Module, str, Any]] = []
        for below, name in self.structure.differing.get(group, ()) if group is not None else ():
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
            return calls.join(parts.skeleton, [given.get(id(leaf), None) if id(leaf) in given else _fresh(leaf) for leaf in parts.leaves])
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
            raise StoppedError(path, _sentence(error)) from error
        finally:
            self.recorder, self.stack = outer, outer_stack

    # Calls of modules, from the interception.

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], proceed: Callable[..., Any]) -> Any:
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
            node.meta["hooked"] = has_hooks(module)
            self.written_below = ()
            out = self.enter_region(module, path, args, kwargs)
            recorder.written |= {join_path(str(node.target), name) for name in self.written_below}
            recorder.note_buffers(module, path)
            recorder.refresh_objects()
            recorder.finish(node, out, path)
            return out
        if self.is_leaf(module):
            node = recorder.call_module(path, args, kwargs)
            node.meta.update(hooked=has_hooks(module), fills_late=any(isinstance(m, nn.RReLU) for m in module.modules()))
            versions = tensor_versions(args, kwargs)
            out = self.run_leaf(module, path, args, kwargs)
            recorder.note_buffers(module, path)
            recorder.note_writes(node, versions)
            recorder.finish(node, out, path)
            return out
        self.stack.append(path)
        try:
            with self.no_foreign_random_numbers():
                out = self.original_forward(module)(*args, **kwargs)
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
    def no_foreign_random_numbers(self) -> Iterator[None]:
        """A graph would hold the numbers that Python's or numpy's generator drew during the capture."""
        python, numbers = random.getstate(), numpy.random.get_state()
        yield
        drawn = numpy.random.get_state()
        if random.getstate() != python or drawn[2] != numbers[2] or not numpy.array_equal(drawn[1], numbers[1]):
            raise self.opaque("its forward draws random numbers from Python's or numpy's generator")

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

    def call_opaque(self, recorder: Recorder, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        node.meta.update(val=out, module_path=path, source=self.opaque_paths[path].source)
        recorder.finish(checked, out, path)
        return out

    # Calls of torch functions, from the interception.

    def function(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.silent:
            return func(*args, **kwargs)
        if time.monotonic() > self.deadline:
            raise TimeUpError
        name = getattr(func, "__name__", "")
        if name in SILENT or (name == "__get__" and not isinstance(args[0], torch.Tensor)):
            return func(*args, **kwargs)
        if name in SCALAR_QUESTIONS:
            return self.question(func, args, kwargs)
        if self.recorder is None and name in SIZE_QUESTIONS:
            known = self.answers.answer(func, args, kwargs)
            if known is not NotImplemented:
                return self.as_fakes(known)
        versions = tensor_versions(args, kwargs) if self.recorder is not None else []
        self.silent += 1
        try:
            out = STAND_INS.get(func, func)(*args, **kwargs)
        except Exception:
            self.last_place = (self.module_path(), self.source())
            raise
        finally:
            self.silent -= 1
        self.answers.follow(func, args, kwargs, out)
        if self.recorder is not None:
            self.recorder.record(func, args, kwargs, out, versions)
            self.recorder.note_written(func, args, kwargs)
        return out

    def question(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model asks for the data of a tensor."""
        answer = self.answers.answer(func, args, kwargs)
        if self.recorder is not None:
            asked = ask_inputs(self.recorder, func, args, kwargs, answer)
            if asked is None:
                raise self.opaque(f"its forward depends on the data of a tensor (`{func.__name__}`)")
            self.recorder.questions.append((asked, bool(answer)))
            return answer
        if answer is NotImplemented:
            self.assumptions.append(f"{self.module_path()} ({self.source()}): a value that depends on data was guessed")
            return guess(func, args)
        return answer

    def as_fakes(self, known: Any) -> Any:
        """Fakes, with their values beside them, of tensors whose size depends on known data."""
        if isinstance(known, (tuple, list)):
            return type(known)(self.as_fakes(item) for item in known)
        if not isinstance(known, torch.Tensor):
            return known
        fake = torch.empty_strided(known.shape, known.stride(), dtype=known.dtype)
        self.answers.set_shadow(fake, known)
        return fake

    def unfinished(self) -> list[str]:
        """Regions begun whose recording did not reach its end."""
        return [path for path, captured in zip(self.started, self.captured, strict=True) if captured is None]

    def finish(self) -> list[Captured]:
        """The regions recorded, each with the predicate that says which calls it serves."""
        env = self.mode.shape_env
        conditions = [condition.xreplace(private.replacements(env)) for condition in private.guards(env)]
        done = [captured for captured in self.captured if captured is not None]
        for captured in done:
            first, last = captured.conditions
            captured.predicate, captured.predicate_text = size_predicate(captured.leaves, conditions[first:last])
        return done


def ambient() -> Hashable:
    """State outside the arguments that decides what torch computes: grad mode, autocast, the default dtype."""
    devices = ("cpu", "cuda")
    casts = tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in devices)
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts, torch.get_default_dtype())


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Python's, numpy's and torch's random numbers go on as if nothing had run."""
    python, numbers = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numbers)


def leaf_names(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A name for each leaf of a call, after the forward's own arguments."""
    try:
        parameters = list(inspect.signature(forward).parameters)
    except (TypeError, ValueError):
        parameters = []
    named = [(parameters[i] if i < len(parameters) else f"args_{i}", value) for i, value in enumerate(args)]
    named += list(kwargs.items())
    walked: list[Any] = []
    names: list[str] = []
    for name, value in named:
        walked.append(value)
        count = len(calls.split(tuple(walked)).leaves) - len(names)
        names += [name] if count == 1 else [f"{name}_{index}" for index in range(count)]
    return names


def _size_key(size: Any) -> Hashable:
    return private.expression(size) if isinstance(size, torch.SymInt) else size


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What attention returns, by description alone: its decomposition on symbolic sizes takes seconds."""
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out.requires_grad_().clone() if needs_grad else out


def _grouped_matmul(left: torch.Tensor, right: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What a grouped matrix product returns, by description alone: on fakes it takes bfloat16 only."""
    shape = (*left.shape[:-1], right.shape[-1]) if right.ndim >= left.ndim else (left.shape[0], right.shape[-1])
    out = left.new_empty(shape, dtype=kwargs.get("out_dtype") or left.dtype)
    needs_grad = torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
    return out.requires_grad_().clone() if needs_grad else out


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    """What `ctc_loss` returns, by description alone: on fakes it asks for the longest target."""
    out = log_probs.new_empty(log_probs.shape[1:2] if reduction == "none" and log_probs.ndim == 3 else ())
    return out.requires_grad_().clone() if torch.is_grad_enabled() and log_probs.requires_grad else out


STAND_INS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.ctc_loss: _ctc_loss,
    torch.nn.functional.scaled_dot_product_attention: _attention,
    **{
        getattr(home, name): _grouped_matmul
        for home, name in ((torch, "_grouped_mm"), (torch.nn.functional, "grouped_mm"))
        if hasattr(home, name)
    },
}
"""Functions whose result capture describes by itself rather than by running them on fakes."""


def tensor_versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[torch.Tensor, int]]:
    """The tensors a call is given and how often each has been written, to find what the call writes."""
    values = [*args, *kwargs.values()]
    values += [item for value in values if isinstance(value, (list, tuple)) for item in value]
    return [(value, value._version) for value in values if isinstance(value, torch.Tensor) and not value.is_inference()]


def _configs(root: nn.Module) -> list[Any]:
    """The configuration objects of the tree's modules, each once."""
    found = {id(config): config for module in root.modules() if hasattr(config := vars(module).get("config"), "__dict__")}
    return list(found.values())


def _fresh(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    fresh = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return fresh.requires_grad_().clone() if leaf.requires_grad else fresh


def _hooked_inside(module: nn.Module) -> bool:
    return any(has_hooks(inner) for inner in module.modules() if inner is not module)


class Kept:
    """The content of an object's `__dict__`, and of the dicts in it (parameters, buffers, hooks), to put back.

    A forward may settle options in a config, or install hooks; a capture leaves no trace of it.
    """

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.tables = [attributes, *(value for value in attributes.values() if isinstance(value, dict))]
        self.contents = [dict(table) for table in self.tables]

    def restore(self) -> None:
        for table, content in zip(self.tables, self.contents, strict=True):
            if table.keys() != content.keys() or any(table[name] is not content[name] for name in content):
                table.clear()
                table.update(content)


def _sentence(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0][:160]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


OWN_FILES = tuple(
    path.rsplit("/", 1)[0] + "/" for path in (torch.__file__, runtime.__file__) if path
)
"""Frames from these folders are torch's or ours, not the user's."""
