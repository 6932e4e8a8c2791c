"""Hold the frozen weights of Linear layers in 8 or 4 bits.

A frozen weight is read and never written, so it can be stored as coarsely as its product allows. The layers become
those of bitsandbytes, in place of the ones there were; gradients go through them, to LoRA adapters on top and to what
lies before, and are those of the model with the stored weights. Unlike other passes this one changes parameters: the
weights are others, in the state dict too.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rewrite import STORE, Change, Numerics, Pass, PassError, PassResult, Preparation, Refusal, matches, size_text

if TYPE_CHECKING:
    from torch import nn

    from rewrite import Program, Region

NOTHING = "no Linear layer has a frozen weight: freeze some first (requires_grad_(False)), before optimize"


@dataclass(frozen=True)
class QuantizeFrozen(Pass):
    """Store frozen Linear weights in 8 or 4 bits, as bitsandbytes does.

    Decided once, when `optimize` is called: a layer that is frozen later stays as it is. Left alone, each with the
    reason: a weight that trains, that another module holds too, that a hook makes (weight_norm, pruning), or that a
    module around the layer reads by itself; and frozen layers of other classes than `torch.nn.Linear`.

    8 bits: an int8 for each element and a float32 for each row of the weight. 4 bits: normal floats with a float32
    for each 64 elements (QLoRA, Dettmers et al., 2023). The state dict has the keys of bitsandbytes. It loads into a
    model that was frozen and quantized in the same way; so does the state dict of the model as it was, which is
    quantized as it is loaded. With `inplace=False` the given model still holds its weights: let go of it.
    """

    bits: int = 8
    """8 or 4."""
    select: tuple[str, ...] | str | None = None
    """Module path globs (`**.attention`, `encoder.layer.[0-11]`): only layers in these modules."""

    name: ClassVar[str] = "quantize-frozen"
    numerics: ClassVar[Numerics] = Numerics.REDUCED

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise PassError(f"quantize-frozen{{bits={self.bits}}}", "bits is 8 or 4", "give one of them")

    def prepare(self, model: nn.Module) -> Preparation:
        """Replace the layers; raises SelectorError for a selector that matches no Linear layer."""
        if importlib.util.find_spec("bitsandbytes") is None:
            cause = "its layers are those of bitsandbytes, which is not installed"
            raise PassError("quantize-frozen", cause, "install it: pip install 'rewrite-torch[bitsandbytes]'")
        from passes.frozen_linears import replace_frozen

        return replace_frozen(model, self.bits, self.selectors)

    def apply(self, program: Program) -> PassResult:
        """Tag the calls of the layers that were replaced, with the bytes they take and took."""
        prepared = program.metadata.get("prepared", {}).get(str(self), Preparation())
        done = set(prepared.replaced)
        changes = tuple(change for region in program.regions for change in self._told(region, done))
        refusals = prepared.refusals if changes or prepared.refusals else (Refusal("", NOTHING),)
        return PassResult(program, bool(changes), changes, refusals)

    @property
    def selectors(self) -> tuple[str, ...]:
        """`select` as a tuple; empty for everything."""
        return (self.select,) if isinstance(self.select, str) else self.select or ()

    def selects(self, path: str) -> bool:
        """Whether the layer at `path` is meant."""
        return not self.selectors or any(matches(selector, path) for selector in self.selectors)

    def _told(self, region: Region, done: set[str]) -> list[Change]:
        from passes.frozen_linears import bytes_before, bytes_now

        calls = [
            node
            for node in region.nodes()
            if node.op == "call_module"
            and f"{region.path}.{node.target}".lstrip(".") in done
            and node.meta.get(STORE) != self.bits
        ]
        if not calls:
            return []
        for node in calls:
            node.meta[STORE] = self.bits
        layers = {str(node.target): region.called(node) for node in calls}.values()
        times = len(region.instances)
        before, now = (times * sum(map(count, layers)) for count in (bytes_before, bytes_now))
        count = times * len(layers)
        told = f"{count} frozen weights stored in {self.bits} bits: {size_text(before)} -> {size_text(now)}"
        return [Change(region.path, told, region.instances, tuple(node.name for node in calls))]
