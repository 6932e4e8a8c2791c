"""Runs of one model with some operators kept in fp32: captured once, rewritten anew for each trial."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rewrite import pipeline
from rewrite.api import optimize
from rewrite.comparison import Bound, compare_tensors
from rewrite.contract import Numerics, Pass
from rewrite.emit.forward import RegionForward
from rewrite.emit.tree import copy_tree
from rewrite.errors import InputError, PassError
from rewrite.observation import copied, observe_outputs
from rewrite.operators import operator_path
from rewrite.program import Region, value_tensors
from rewrite.verify import replaced_paths, require_numbers, with_references

if TYPE_CHECKING:
    from rewrite.certificate import Row
    from rewrite.verify import Call


class Trials:
    """Compares what `model` gives with what its rewrites give, in eval mode."""

    def __init__(
        self, model: nn.Module, passes: tuple[Pass, ...], holder: Pass, option: str, call: Call, seed: int
    ) -> None:
        """`holder` is the pass among `passes` whose `option` takes selectors. Raises what `optimize` raises."""
        require_numbers(model)
        self.passes, self.holder, self.option = passes, holder, option
        self.args, self.kwargs = copied(call)  # captured and run alike: two arguments may be one tensor of the caller's
        self.seed, self.count = seed, 0
        self.module = copy_tree(model).eval()
        self.expected = self._expected(self.module)
        inputs = dict(self.kwargs) if self.kwargs else self.args
        self.module = optimize(self.module, self._that_matter(()), example_inputs=inputs, inplace=True)
        self._stand_in(model)
        self.forward = next(each for each in self._forwards() if each.path == "")
        self.candidates = tuple(dict.fromkeys(self._low()))
        """Paths of the operators that are not computed in fp32 with no selector added."""

    def rows(self, allowed: Bound, selectors: Sequence[str]) -> tuple[Row, ...]:
        """Each output of a rewrite that keeps `selectors`, compared."""
        self.count += 1
        rewriting = self.forward.rewriting
        for forward in self._forwards():
            forward.forget()
        rewriting.passes = self._that_matter(selectors)  # for kinds of calls that were not captured yet
        rewriting.emit(pipeline.run(rewriting.before[0], rewriting.passes).program)
        found = observe_outputs(self.module, self.args, self.kwargs, seed=self.seed)
        expected = {path: value for path, value in self.expected.items() if path in found}
        return tuple(compare_tensors("output", expected, found, allowed, ""))

    def with_kept(self, selectors: Sequence[str]) -> tuple[Pass, ...]:
        """The pipeline with more selectors in the option."""
        had = getattr(self.holder, self.option)
        kept = (*((had,) if isinstance(had, str) else had or ()), *selectors)
        changed: Pass = replace(self.holder, **{self.option: kept})
        return tuple(changed if each is self.holder else each for each in self.passes)

    def _that_matter(self, selectors: Sequence[str]) -> tuple[Pass, ...]:
        """The passes that change numbers: those that keep them bit for bit take no part in the trials."""
        return tuple(each for each in self.with_kept(selectors) if each.numerics is not Numerics.EXACT)

    def _expected(self, module: nn.Module) -> Any:
        try:
            return observe_outputs(module, self.args, self.kwargs, seed=self.seed)
        except Exception as error:  # the model's own, whatever it is
            cause = f"the original module raises on the example inputs: {type(error).__name__}: {error}"
            raise InputError(f"bisect {type(module).__name__}", cause, "pass inputs that it accepts") from error

    def _stand_in(self, model: nn.Module) -> None:
        """Compare with a model that holds the weights that a pass has put in the place of the given ones."""
        replaced = replaced_paths(self.module)
        if replaced:
            original = with_references(copy_tree(model).eval(), self.module, replaced)
            self.expected = self._expected(original)

    def _forwards(self) -> Iterator[RegionForward]:
        present = (vars(module).get("forward") for module in self.module.modules())
        yield from (each for each in present if isinstance(each, RegionForward))

    def _low(self) -> Iterator[str]:
        results = self.forward.rewriting.results
        if not results:
            raise PassError(f"bisect {self.holder}", "the model's forward left no graph", "see rewrite show MODEL")
        step = next(step for step in results[0].steps if type(step.applied) is type(self.holder))
        for region in step.before.regions:
            for path in region.instances:
                now = [_dtypes(each) for each in step.after.regions if path in each.instances]
                for name, had in _dtypes(region).items():
                    if had and any(has.get(name, had) != had for has in now):
                        node = next(node for node in region.nodes() if node.name == name)
                        yield operator_path(region, node, path)


def _dtypes(region: Region) -> dict[str, tuple[torch.dtype, ...]]:
    """Node name -> dtypes of the floating-point tensors that an operator gives."""
    called = (node for node in region.nodes() if node.op.startswith("call"))
    return {
        node.name: tuple(each.dtype for each in value_tensors(node.meta.get("val")) if each.is_floating_point())
        for node in called
    }
