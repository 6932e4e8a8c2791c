"""Parity: does a rewritten module compute what the original does, within the numerics it declares?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rewrite.certificate import Certificate as Certificate
from rewrite.certificate import Row as Row
from rewrite.comparison import compare, structure
from rewrite.contract import Numerics, loosest
from rewrite.emit.forward import RegionForward
from rewrite.emit.held import hold, is_held
from rewrite.emit.tree import copy_tree
from rewrite.errors import InputError, VerifyError
from rewrite.inputs import as_call
from rewrite.observation import Observation, observe, tensors
from rewrite.precision import Precision
from rewrite.scaled_steps import Scaling
from rewrite.sensitivity import Sensitivity
from rewrite.tolerance import tolerance_for

Call = tuple[tuple[Any, ...], dict[str, Any]]


def verify(
    original: nn.Module,
    rewritten: nn.Module,
    example_inputs: Any,
    *,
    seeds: Sequence[int] = (0,),
    numerics: Numerics | None = None,
    low: torch.dtype | None = None,
) -> Certificate:
    """Run both modules on the same inputs under the same seeds and compare everything a step leaves behind.

    Compared are the loss, the outputs, every gradient, the buffers and the random streams after the step and how often
    hooked modules ran; in train and in eval mode, for the batch given and for another batch size, when the inputs
    have one; and once, the state dict's keys, shared parameters and ties. A difference is in the certificate, not
    an error.

    example_inputs: a dict of keyword arguments, a tuple or list of positional ones, or one tensor.
    numerics: what to hold the rewrite to; None for what its passes declare.
    low: the precision that `Numerics.REDUCED` computes in; None for what its passes declare, or else bfloat16.

    A rewrite of reduced precision may be as far off as random roundings to that precision move the original, by
    `rewrite/sensitivity.py`. Its loss is scaled for the backward as its passes declare.

    Where a pass has put other weights in the place of a module's, the original is run with those: what is compared is
    what was made of them. The certificate names how many there are.

    Modules that a pass holds in eval mode are in eval mode in the original too, while it is compared.

    Both modules are left as they were: gradients, buffers, modes, random streams. Raises `VerifyError` when a
    module holds no numbers (meta device) and `InputError` when the original cannot run the inputs.
    """
    for module in (original, rewritten):
        require_numbers(module)
    numerics, precision = numerics or declared_numerics(rewritten), declared_precision(rewritten)
    low = low or (torch.bfloat16 if precision is None else getattr(torch, precision.dtype))
    replaced = replaced_paths(rewritten)
    rows, cases, skipped = list(structure(original, rewritten, replaced)), [], []
    original = with_references(original, rewritten, replaced) if replaced else original
    original = holding_alike(original, rewritten)
    sensitivity = Sensitivity(original, low) if numerics is Numerics.REDUCED else None
    scaling = Scaling(precision)
    calls = [as_call(example_inputs)]
    calls += [call for call in [another_batch(calls[0])] if call is not None]
    for position, (train, seed) in itertools.product(range(len(calls)), itertools.product((True, False), seeds)):
        args, kwargs = calls[position]
        case = f"{'train' if train else 'eval'}, batch {_batch_size(calls[position])}, seed {seed}"
        try:
            expected = observe(original, args, kwargs, seed=seed, train=train)
        except Exception as error:
            if position == 0:
                raise _cannot_run(original, error) from error
            skipped.append(f"{case}: {type(error).__name__}: {error}")
            continue
        cases.append(case)
        try:
            found = scaling.observe(rewritten, args, kwargs, seed=seed, train=train)
        except Exception as error:  # noqa: BLE001  whatever the module raises is the finding
            rows.append(Row("forward and backward", "error", False, case=case, note=f"{type(error).__name__}: {error}"))
            continue
        found = _without_scales(found, replaced)
        given = [tensor for _, tensor in tensors((args, kwargs))]
        if sensitivity is None:
            rows += compare(expected, found, tolerance_for(original, given, numerics, low), case)
            continue
        moved = sensitivity.of(expected, args, kwargs, seed=seed, train=train, scale=scaling.scale)
        tolerance = tolerance_for(original, given, Numerics.REASSOCIATED, low)
        rows += moved.widened(compare(expected, found, tolerance, case), found)
        skipped += [f"{case}: {reason}" for reason in moved.undecided()]
    passed = all(row.passed for row in rows)
    return Certificate(passed, numerics.value, tuple(rows), tuple(cases), tuple(skipped))


def declared_precision(module: nn.Module) -> Precision | None:
    """What the passes that made `module` compute in; None where none of them casts."""
    forward = vars(module).get("forward")
    return forward.rewriting.precision if isinstance(forward, RegionForward) else None


def declared_numerics(module: nn.Module) -> Numerics:
    """What the passes that made `module` promise; exact for a module that no pass made."""
    forward = vars(module).get("forward")
    return loosest(forward.rewriting.passes) if isinstance(forward, RegionForward) else Numerics.EXACT


def replaced_paths(module: nn.Module) -> tuple[str, ...]:
    """The modules in whose place a pass has put others."""
    forward = vars(module).get("forward")
    prepared = forward.rewriting.prepared if isinstance(forward, RegionForward) else {}
    return tuple(path for preparation in prepared.values() for path in preparation.replaced)


def with_references(original: nn.Module, rewritten: nn.Module, paths: Sequence[str]) -> nn.Module:
    """The original with ordinary modules that compute what those at `paths` in the rewritten one do."""
    made = copy_tree(original)
    for path in paths:
        parent, _, name = path.rpartition(".")
        reference = rewritten.get_submodule(path).reference()  # type: ignore[operator]
        made.get_submodule(parent)._modules[name] = reference
    return made


def _without_scales(found: Observation, replaced: Sequence[str]) -> Observation:
    """`found` without the buffers of modules that hold other weights: ordinary ones have none."""
    prefixes = tuple(f"{path}." for path in replaced)
    buffers = {name: buffer for name, buffer in found.buffers.items() if not name.startswith(prefixes)}
    return replace(found, buffers=buffers) if prefixes else found


def holding_alike(original: nn.Module, rewritten: nn.Module) -> nn.Module:
    """The original with those modules in eval mode that the rewritten one holds there."""
    held = [path for path, module in rewritten.named_modules() if is_held(module)]
    if not held:
        return original
    made = copy_tree(original)
    for path in held:
        hold(made.get_submodule(path))
    return made


def another_batch(call: Call) -> Call | None:
    """The same inputs with one row fewer, or with the row doubled; None when nothing has a batch.

    The batch is the first dimension of the first tensor that has one, and of every tensor of the same size there.
    """
    size = _batch_size(call)
    if size == 0:
        return None

    def resized(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != size:
            return value
        rows = value.detach()[: size - 1] if size > 1 else torch.cat([value.detach()] * 2)
        return rows.clone().requires_grad_(value.requires_grad)

    args, kwargs = torch.utils._pytree.tree_map(resized, call)
    return args, kwargs


def _batch_size(call: Call) -> int:
    return next((tensor.shape[0] for _, tensor in tensors(call) if tensor.dim() > 0), 0)


def require_numbers(module: nn.Module) -> None:
    """Raise VerifyError for a module on the meta device."""
    held = itertools.chain(module.named_parameters(), module.named_buffers())
    name = next((name for name, tensor in held if tensor.is_meta), None)
    if name is None:
        return
    raise VerifyError(
        f"verify {type(module).__name__}",
        f"{name} is on the meta device, so there are no numbers to compare",
        "give the module weights (`module.to_empty(device='cpu')`, then its own initialisation), or build a smaller "
        "configuration of it on the CPU",
    )


def _cannot_run(module: nn.Module, error: Exception) -> InputError:
    return InputError(
        f"verify {type(module).__name__}",
        f"the original module raises on the example inputs: {type(error).__name__}: {error}",
        "call the module with these inputs outside `verify`, and pass inputs that it accepts",
    )
