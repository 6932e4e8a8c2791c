"""Compute in half precision where that is safe, by casts in the graph.

The levels are those of apex amp. O1 casts operator by operator: products and what lies between them run in half
precision, islands of softmax, norms, reductions, exponentials, losses and routing in fp32, on every device alike. O2
computes all but those islands in half. Under both, parameters stay fp32: their half copies are made once a step, and
what is saved is fp32. O3 holds and computes everything but losses in half. O0 changes nothing.

The colouring is that of TensorFlow's auto_mixed_precision; see `passes/colouring.py`, `passes/islands.py` and the lists
in `passes/precision_lists.csv`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from passes.levels import DYNAMIC, LEVELS, Level, chosen_level, table
from rewrite import Change, Numerics, Pass, PassError, PassResult, Precision, Refusal, SelectorError, matches

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.fx import Node

    from rewrite import Program, Region

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "float16": "float16", "bfloat16": "bfloat16"}
NOTHING = "no operator of the model gains from half precision: there are no matrix products in fp32 in its graphs"
ALL_KEPT = (
    "no operator is left to compute in half precision: what would gain from it is kept in fp32, as keep_fp32 says"
)


@dataclass(frozen=True)
class MixedPrecision(Pass):
    """Compute in half precision where that is safe, with casts in the graph that no outer autocast undoes."""

    level: str = "O1"
    """O0: as it is. O1: fp32 weights, products in half. O2: all in half but for islands, fp32 weights for the
    optimizer. O3: all in half, weights too."""
    dtype: str = "fp16"
    """fp16 or bf16."""
    keep_fp32: tuple[str, ...] | str = ()
    """Path globs of modules (`**.lm_head`), or of operators in them (`encoder.layer.0.attention.matmul`), to keep in
    fp32."""
    fp32_residual: bool = True
    """Sums of a value and of what was computed from it (residual streams) stay in fp32."""
    patch_torch_functions: bool | None = None
    """Column of the level: casts operator by operator."""
    keep_batchnorm_fp32: bool | None = None
    """Column of the level: norms in fp32."""
    loss_scale: float | str | None = None
    """Column of the level: what `rewrite.loss_scaler` multiplies losses by, a number or dynamic."""

    name: ClassVar[str] = "mixed-precision"
    numerics: ClassVar[Numerics] = Numerics.REDUCED

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise PassError(f"mixed-precision{{dtype={self.dtype}}}", "there is no such dtype", "choose fp16 or bf16")
        scale = self.chosen.loss_scale
        if scale != DYNAMIC and (isinstance(scale, (str, bool)) or not scale > 0):
            subject = f"mixed-precision{{loss_scale={scale}}}"
            raise PassError(subject, "a loss scale is a number above 0, or dynamic", "leave it out for the level's own")

    @property
    def chosen(self) -> Level:
        """The row of the level's table, with what was given in place of its own columns."""
        columns = ("patch_torch_functions", "keep_batchnorm_fp32", "loss_scale")
        return chosen_level(self.level, self._short, {name: getattr(self, name) for name in columns})

    @property
    def _short(self) -> str:
        return "bf16" if "b" in self.dtype else "fp16"

    @classmethod
    def table(cls) -> Sequence[tuple[str, ...]]:
        """The levels."""
        return table()

    def settings(self) -> Mapping[str, str]:
        """The level's row with what was given in its place."""
        header, row = table({self.level: self.chosen})
        return dict(zip(header, row, strict=True))

    def precision(self) -> Precision | None:
        """What the model is to compute in; None under O0, which leaves it alone."""
        if self.level == "O0":
            return None
        level = self.chosen
        return Precision(DTYPES[self.dtype], level.loss_scale, level.master_weights is False)

    def apply(self, program: Program) -> PassResult:
        """Put casts into every graph; says what stays in fp32 and why."""
        if self.level == "O0":
            return _nothing(program, "level O0 is fp32: nothing is cast")
        if "precision" in program.metadata:
            return _nothing(program, f"the precision is set already, by {program.metadata['precision']}")
        return _Application(self, program).run()

    def offers(self, program: Program) -> Sequence[Pass]:
        """O1 in bf16, which needs no loss scale; only where `allow` lets precision be reduced."""
        return () if self.level == "O0" else (replace(self, level="O1", dtype="bf16"),)


class _Application:
    """One run of the pass."""

    def __init__(self, options: MixedPrecision, program: Program) -> None:
        self.options, self.program = options, program
        self.patterns = (options.keep_fp32,) if isinstance(options.keep_fp32, str) else tuple(options.keep_fp32)
        self.matched: set[str] = set()
        self.declared = tuple(_declared(program, options.dtype))
        self.changes: list[Change] = []
        self.refusals: list[Refusal] = []

    def run(self) -> PassResult:
        for region in self.program.regions:
            for kept, instances in self._groups(region):
                self.refusals += self._left_single(region, kept, instances)
                program, part = self.program.split(self.program.left_of(region), instances)
                change = self._cast(part, kept)
                if change is not None:
                    self.program = program
                    self.changes.append(change)
        first = self.program.metadata.get("first", True)
        missing = [pattern for pattern in self.patterns if pattern not in self.matched]
        if missing and first:
            raise SelectorError(
                f"mixed-precision{{keep_fp32={missing[0]}}}",
                "it matches no module, and no operator in one, that a graph of the model runs",
                "give a path as named_modules() shows it, with * for one component and ** for any number",
            )
        if not self.changes and first:
            return _nothing(self.program, ALL_KEPT if self.matched else NOTHING, *self.refusals)
        metadata = {**self.program.metadata, "precision": str(self.options)}
        program = replace(self.program, metadata=metadata)
        return PassResult(program, bool(self.changes), tuple(self.changes), tuple(self.refusals))

    def _cast(self, region: Region, kept: frozenset[str]) -> Change | None:
        import torch

        from passes.casting import Casting
        from passes.colouring import Colouring

        dtype = getattr(torch, DTYPES[self.options.dtype])
        limits = (torch.finfo(dtype).tiny, torch.finfo(dtype).max)
        nodes = {node for node in region.nodes() if node.name in kept}
        colours = Colouring(region, self.options.chosen, limits, nodes, self.options.fp32_residual).run()
        if not colours.low:
            return None
        count = Casting(region, colours, dtype).run()
        if not count.casts and not count.weights and not count.low:
            return None
        short = self.options.dtype
        summary = (
            f"{count.low} operators in {short}: {count.narrowed} casts to {short}, {count.widened} to fp32, "
            f"{count.weights} weights cast once a step"
        )
        names = (*count.nodes, *(node.name for node in region.nodes() if node in colours.low))
        return Change(region.path, summary, region.instances, tuple(dict.fromkeys(names)))

    def _left_single(self, region: Region, kept: frozenset[str], instances: tuple[str, ...]) -> Iterator[Refusal]:
        """Layers that no cast reaches, but for those the user keeps; once for all instances."""
        from passes.nodes import path_in
        from passes.whole_layers import why_single

        for node in region.nodes():
            reason = "" if node.name in kept else why_single(region, node)
            if reason:
                yield Refusal(path_in(node, region, instances[0]), reason, str(node.meta.get("source", "")))

    def _groups(self, region: Region) -> Iterator[tuple[frozenset[str], tuple[str, ...]]]:
        """Instances of a region by the names of the nodes that are kept in fp32 in them."""
        groups: dict[frozenset[str], list[str]] = {}
        for instance in region.instances:
            kept = frozenset(node.name for node in region.nodes() if self._is_kept(node, region, instance))
            groups.setdefault(kept, []).append(instance)
        yield from ((kept, tuple(instances)) for kept, instances in groups.items())

    def _is_kept(self, node: Node, region: Region, instance: str) -> bool:
        from passes.nodes import path_in
        from passes.operators import operator_name

        if not node.op.startswith("call"):
            return False
        path = path_in(node, region, instance)
        label = path if node.op == "call_module" else f"{path}.{operator_name(region, node)}".lstrip(".")
        hits = {pattern for pattern in self.patterns if matches(pattern, label)}
        self.matched |= hits
        return bool(hits) or any(f".{name}." in f".{path}." for name in self.declared)


def _declared(program: Program, dtype: str) -> Iterator[str]:
    """Modules that the model's authors keep in fp32: transformers' `_keep_in_fp32_modules`, which are meant for fp16,
    and the strict ones, meant for bf16 too."""
    for region in program.regions:
        for module in region.captured.module.modules():
            if DTYPES[dtype] == "float16":
                yield from getattr(module, "_keep_in_fp32_modules", None) or ()
            yield from getattr(module, "_keep_in_fp32_modules_strict", None) or ()


def _nothing(program: Program, reason: str, *more: Refusal) -> PassResult:
    first = program.metadata.get("first", True)
    return PassResult(program, False, refusals=(Refusal("", reason), *more) if first else ())


__all__ = ["LEVELS", "MixedPrecision"]
