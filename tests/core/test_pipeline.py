from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from rewrite.contract import Numerics, Pass, PassResult
from rewrite.errors import ContractError, PassCrashError, SelectorError
from rewrite.pipeline import run
from rewrite.program import Program
from rewrite.tags import RECOMPUTE
from rewrite.text import program_text
from tests.core.programs import block_graph, two_blocks


@dataclass(frozen=True)
class Tag(Pass):
    """Tags the nodes of the blocks; its effect is what an honest pass has."""

    name: ClassVar[str] = "tag"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    segment: int = 0

    def apply(self, program: Program) -> PassResult:
        for node in program.region("blocks.0").nodes():
            if node.op == "call_function":
                node.meta[RECOMPUTE] = self.segment
        return PassResult(program, modified=True)


@dataclass(frozen=True)
class Does(Pass):
    """Does whatever a test wants."""

    name: ClassVar[str] = "does"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    action: Callable[[Program], Any] = lambda program: PassResult(program, False)

    def __str__(self) -> str:
        return "does"

    def apply(self, program: Program) -> PassResult:
        return self.action(program)


def error_of(action: Callable[[Program], Any]) -> str:
    with pytest.raises(ContractError) as caught:
        run(two_blocks(), [Tag(), Does(action)])
    message = str(caught.value)
    assert message.startswith("pass does (after tag): ")
    assert "\nNext: pass developer: " in message
    return message


def block(program: Program) -> Any:
    return program.region("blocks.0").graph


def node(program: Program, name: str) -> Any:
    return next(node for node in block(program).nodes if node.name == name)


def test_each_pass_gets_a_copy_and_every_program_between_stays() -> None:
    program = two_blocks()

    result = run(program, [Tag(1), Tag(2)])

    texts = [program_text(step.before) for step in result.steps] + [program_text(result.program)]
    assert RECOMPUTE not in texts[0]
    assert "recompute=1" in texts[1]
    assert "recompute=2" in texts[2]
    assert "recompute=1" not in texts[2]
    assert program_text(program) == program_text(two_blocks())


def test_no_passes_give_the_program_itself() -> None:
    program = two_blocks()

    assert run(program, []).program is program


def test_observers_are_called_around_each_pass_in_order() -> None:
    class Log:
        def __init__(self) -> None:
            self.lines: list[str] = []

        def before(self, pass_: Pass, program: Program) -> None:
            self.lines.append(f"before {pass_} {'recompute' in program_text(program)}")

        def after(self, pass_: Pass, program: Program, result: PassResult, seconds: float) -> None:
            assert seconds >= 0
            changed = program_text(result.program) != program_text(program)
            self.lines.append(f"after {pass_} {changed}")

    log = Log()

    run(two_blocks(), [Tag(), Does()], [log])

    assert log.lines == ["before tag False", "after tag True", "before does True", "after does False"]


def test_a_result_of_another_type_is_named() -> None:
    assert "apply() returned None, not a PassResult" in error_of(lambda program: None)
    assert "apply() returned a Program, not a PassResult" in error_of(lambda program: program)
    assert "the result holds a str, not a Program" in error_of(lambda program: PassResult("x", True))  # type: ignore[arg-type]


def test_a_silent_change_is_named_with_the_line() -> None:
    def retag(program: Program) -> PassResult:
        node(program, "gelu").meta[RECOMPUTE] = 7
        return PassResult(program, modified=False)

    message = error_of(retag)

    assert "it says modified=False, but the program changed" in message
    assert "+  %gelu = call_function" in message
    assert "{recompute=7}" in message


def test_a_claimed_change_that_did_not_happen_is_named() -> None:
    message = error_of(lambda program: PassResult(program, modified=True))

    assert "it says modified=True, but nothing in the program changed" in message


def test_outputs_of_another_structure_are_named() -> None:
    def flatten(program: Program) -> PassResult:
        node(program, "output").args = (node(program, "dropout"),)
        return PassResult(program, modified=True)

    message = error_of(flatten)

    was = "(float32[2, 8], {'skip': float32[2, 8]})"
    assert f"the outputs of region 'blocks.0' changed from {was} to float32[2, 8]" in message


@pytest.mark.parametrize("val", [torch.empty(2, 4, device="meta"), torch.empty(2, 8, dtype=torch.half, device="meta")])
def test_outputs_of_another_type_are_named(val: torch.Tensor) -> None:
    def retype(program: Program) -> PassResult:
        node(program, "dropout").meta["val"] = val
        return PassResult(program, modified=True)

    assert "the outputs of region 'blocks.0' changed from (float32[2, 8]" in error_of(retype)


def test_changed_inputs_are_named() -> None:
    def add(program: Program) -> PassResult:
        graph = block(program)
        with graph.inserting_after(node(program, "hidden")):
            graph.placeholder("mask")
        return PassResult(program, modified=True)

    message = error_of(add)

    was = "hidden: float32[2, 8]"
    assert f"the inputs of region 'blocks.0' changed from ({was}) to ({was}, mask: none)" in message


def test_lost_regions_and_instances_are_named() -> None:
    def lose_region(program: Program) -> PassResult:
        return PassResult(replace(program, regions=program.regions[:1]), modified=True)

    def lose_instance(program: Program) -> PassResult:
        root, blocks = program.regions
        return PassResult(replace(program, regions=(root, replace(blocks, instances=("blocks.0",)))), modified=True)

    def double_instance(program: Program) -> PassResult:
        return PassResult(replace(program, regions=(*program.regions, program.regions[1])), modified=True)

    def misname(program: Program) -> PassResult:
        root, blocks = program.regions
        return PassResult(replace(program, regions=(root, replace(blocks, path="nowhere"))), modified=True)

    assert "instances changed: lost 'blocks.0', 'blocks.1'" in error_of(lose_region)
    assert "instances changed: lost 'blocks.1'" in error_of(lose_instance)
    assert "instances changed: added 'blocks.0', 'blocks.1'" in error_of(double_instance)
    assert "region 'nowhere' is not among its own instances" in error_of(misname)


def test_an_invalid_graph_is_named() -> None:
    def use_before_definition(program: Program) -> PassResult:
        node(program, "linear").args = (node(program, "gelu"), node(program, "gelu"))
        return PassResult(program, modified=True)

    assert "the graph of region 'blocks.0' is not valid: " in error_of(use_before_definition)


def test_a_tag_of_the_wrong_type_is_named() -> None:
    def tag(program: Program) -> PassResult:
        node(program, "gelu").meta[RECOMPUTE] = "yes"
        return PassResult(program, modified=True)

    assert "node gelu of region 'blocks.0' is tagged recompute='yes', not an int" in error_of(tag)


def test_a_change_to_the_program_before_is_named() -> None:
    """A pass that kept hold of an earlier program must not reach back into it."""
    original = two_blocks()

    def reach_back(program: Program) -> PassResult:
        node(original, "gelu").meta[RECOMPUTE] = 1
        return PassResult(program, modified=False)

    with pytest.raises(ContractError, match="pass does \\(the first pass\\): it changed the program from before it"):
        run(original, [Does(reach_back)])


def test_instances_may_be_split_into_regions_of_their_own() -> None:
    def split(program: Program) -> PassResult:
        parted, region = program.split(program.region("blocks.1"), ("blocks.1",))
        for made in region.nodes():
            if made.op == "call_function":
                made.meta[RECOMPUTE] = 0
        return PassResult(parted, modified=True)

    result = run(two_blocks(), [Does(split)])

    assert [region.instances for region in result.program.regions] == [("",), ("blocks.1",), ("blocks.0",)]


def test_an_error_inside_a_pass_is_wrapped_and_names_it() -> None:
    def crash(program: Program) -> PassResult:
        raise ZeroDivisionError("by zero")

    with pytest.raises(PassCrashError) as caught:
        run(two_blocks(), [Tag(), Does(crash)])

    assert "pass does (after tag): apply() raised ZeroDivisionError: by zero" in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_expected_error_of_a_pass_goes_through() -> None:
    refusal = SelectorError("selector 'x'", "it matches no module", "list the modules")

    def refuse(program: Program) -> PassResult:
        raise refusal

    with pytest.raises(SelectorError) as caught:
        run(two_blocks(), [Does(refuse)])

    assert caught.value is refusal


def test_text_names_sizes_in_order_of_appearance() -> None:
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.DYNAMIC])
    value = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(5, 7), symbolic_context=context)
    program = two_blocks()
    node(program, "hidden").meta["val"] = value
    node(program, "linear").meta["val"] = torch.cat([value, value], dim=1).T

    text = program_text(program)

    assert "%hidden = placeholder hidden : float32[s0, s1]" in text
    assert ") : float32[2*s1, s0]\n" in text


def test_text_is_the_same_for_equal_graphs() -> None:
    expected = (
        "  %gelu = call_function torch.nn.functional.gelu(%linear, approximate='tanh') : float32[2, 8]\n"
        "  %dropout = call_function torch.nn.functional.dropout(%gelu, 0.1) : float32[2, 8]\n"
        "  return (%dropout, {'skip': %hidden})"
    )

    assert expected in program_text(two_blocks())
    assert [made.name for made in block_graph().nodes] == ["hidden", "linear", "gelu", "dropout", "output"]
