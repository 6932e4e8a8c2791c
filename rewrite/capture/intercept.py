"""Listen to module calls, torch functions, autocast and custom autograd Functions while a session runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

from rewrite import runtime
from rewrite.capture import private
from rewrite.capture.descriptions import tensor_versions
from rewrite.capture.functions import call_function
from rewrite.capture.own_checkpoint import checkpoint_generator
from rewrite.capture.surroundings import surroundings

if TYPE_CHECKING:
    from rewrite.capture.session import Session

LOCK = threading.RLock()
"""Interception replaces methods of shared classes: one capture at a time."""
ACTIVE: list[Session] = []


def capturing() -> bool:
    """Whether a capture runs now: emitted forwards then step aside for the original ones."""
    return bool(ACTIVE) and ACTIVE[-1].thread == threading.get_ident()


class FunctionMode(TorchFunctionMode):
    """Hands every torch function to the session."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        session = self.session
        if func is private.set_grad_enabled:
            func(*args)
            if session.recorder is not None and not session.silent:
                session.recorder.graph.call_function(runtime.set_grad_enabled, tuple(args))
            return None
        return call_function(session, func, args, kwargs or {})


UNRECORDED: tuple[tuple[Any, str, str], ...] = (
    *(
        (owner, name, "sets or reads the state of the random number generator")
        for owner in (torch, torch.random)
        for name in ("manual_seed", "seed", "get_rng_state", "set_rng_state", "fork_rng")
        if name in vars(owner)
    ),
    (torch.autograd.graph.saved_tensors_hooks, "__enter__", "packs saved tensors by hooks of its own"),
)
"""What a forward may do that leaves no node: the module that does it keeps its own forward."""


def _refusing(session: Session, original: Callable[..., Any], what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        here = session.thread == threading.get_ident() and not session.silent
        if here and session.recorder is not None:
            raise session.opaque(f"its forward {what}")
        return original(*args, **kwargs)

    return refuse


@contextlib.contextmanager
def interception(session: Session) -> Iterator[None]:
    """Everything the session listens to, put back as it was at the end."""
    with LOCK, contextlib.ExitStack() as stack:
        ACTIVE.append(session)
        stack.callback(ACTIVE.pop)
        stack.enter_context(_replaced(nn.Module, "__call__", _module_call(session)))
        stack.enter_context(_replaced(nn.Module, "__getattr__", _module_getattr(session)))
        stack.enter_context(_replaced(nn.Module, "__setattr__", _module_setattr(session)))
        stack.enter_context(_replaced(torch.autograd.Function, "apply", _function_apply(session)))
        stack.enter_context(_replaced(torch.autocast, "__enter__", _autocast_enter(session)))
        stack.enter_context(_replaced(torch.autocast, "__exit__", _autocast_exit(session)))
        stack.enter_context(_replaced(*private.CHECKPOINT_GENERATOR, checkpoint_generator(session)))
        for owner, name, what in UNRECORDED:
            stack.enter_context(_replaced(owner, name, _refusing(session, vars(owner)[name], what)))
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        stack.enter_context(session.mode)
        stack.enter_context(private.enable_python_dispatcher())
        stack.enter_context(FunctionMode(session))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _module_call(session: Session) -> Callable[..., Any]:
    original = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if session.thread != threading.get_ident():
            return original(module, *args, **kwargs)
        return session.call(module, args, kwargs, original)

    return call


def _module_getattr(session: Session) -> Callable[..., Any]:
    original = nn.Module.__getattr__

    def getattribute(module: nn.Module, name: str) -> Any:
        key = (id(module), name)
        if key in session.hidden:
            session.read_hidden = True
            return session.hidden[key]
        return original(module, name)

    return getattribute


def _module_setattr(session: Session) -> Callable[..., Any]:
    original = nn.Module.__setattr__

    def assign(module: nn.Module, name: str, value: Any) -> None:
        recorder = session.recorder
        elsewhere = session.thread != threading.get_ident()
        if recorder is None or session.silent or elsewhere or id(module) not in session.paths:
            original(module, name, value)
            return
        missing = object()
        before = getattr(module, name, missing)
        if before is value or (isinstance(value, (bool, int, float, str, type(None))) and before == value):
            return
        raise session.opaque(f"its forward assigns to the attribute {name!r} of a module")

    return assign


def _function_apply(session: Session) -> Any:
    original = vars(torch.autograd.Function)["apply"].__func__

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if session.silent or session.thread != threading.get_ident():
            return original(cls, *args, **kwargs)
        if cls is torch_checkpoint.CheckpointFunction and session.recorder is not None:
            raise session.opaque("its forward calls torch.utils.checkpoint with use_reentrant=True")
        versions = tensor_versions(args, kwargs)
        session.silent += 1
        try:
            out = original(cls, *args, **kwargs)
        finally:
            session.silent -= 1
        if session.recorder is not None:
            session.recorder.record(runtime.ApplyFunction(cls), args, kwargs, out, versions)
        return out

    return classmethod(apply)


def _autocast_enter(session: Session) -> Callable[..., Any]:
    original: Callable[..., Any] = torch.autocast.__enter__

    def enter(context: Any) -> Any:
        recorder = session.recorder
        if recorder is not None and not session.silent and session.thread == threading.get_ident():
            arguments = (context.device, context.fast_dtype, context._enabled, context._cache_enabled)
            context._rewrite_node = recorder.graph.call_function(runtime.enter_autocast, arguments)
        entered = original(context)
        if recorder is not None:
            recorder.surroundings = surroundings()
        return entered

    return enter


def _autocast_exit(session: Session) -> Callable[..., Any]:
    original = torch.autocast.__exit__

    def leave(context: Any, *error: Any) -> Any:
        node = context.__dict__.pop("_rewrite_node", None)
        if node is not None and session.recorder is not None:
            session.recorder.graph.call_function(runtime.exit_autocast, (node,))
        left = original(context, *error)
        if session.recorder is not None:
            session.recorder.surroundings = surroundings()
        return left

    return leave
