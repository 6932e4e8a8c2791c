from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewrite.contract import Numerics, Pass, PassResult
from rewrite.errors import SpecError
from rewrite.spec import parse, render


@dataclass(frozen=True)
class Shrink(Pass):
    name: ClassVar[str] = "shrink"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    policy: Literal["blocks", "sqrt", None, 3] = "blocks"
    every: int = 1
    ratio: float = 0.5
    strict: bool = False
    budget: str | int | None = None
    select: tuple[str, ...] = ()
    sizes: tuple[tuple[int, float], ...] = ()
    anything: Any = None

    def apply(self, program: Any) -> PassResult:
        return PassResult(program, False)


@dataclass(frozen=True)
class Grow(Pass):
    name: ClassVar[str] = "grow-up"
    numerics: ClassVar[Numerics] = Numerics.EXACT
    times: int

    def __post_init__(self) -> None:
        if self.times < 0:
            raise ValueError("times must not be negative")

    def apply(self, program: Any) -> PassResult:
        return PassResult(program, False)


def lookup(name: str) -> type[Pass]:
    known = {"shrink": Shrink, "grow-up": Grow}
    if name not in known:
        raise SpecError("pass spec", f"no pass is called {name!r}", "look again")
    return known[name]


WORDS = st.text(max_size=12) | st.sampled_from(["true", "none", "1", "-2.5", "6GiB", "inf", "model.layers.*", "a,b"])
FINITE = st.floats(allow_nan=False)
SHRINKS = st.builds(
    Shrink,
    policy=st.sampled_from(["blocks", "sqrt", None, 3]),
    every=st.integers(),
    ratio=FINITE,
    strict=st.booleans(),
    budget=st.none() | st.integers() | WORDS,
    select=st.lists(WORDS, max_size=3).map(tuple),
    sizes=st.lists(st.tuples(st.integers(), FINITE), max_size=3).map(tuple),
    anything=st.recursive(st.none() | st.booleans() | st.integers() | FINITE | WORDS, lambda v: st.lists(v).map(tuple)),
)
GROWS = st.builds(Grow, times=st.integers(min_value=0))


@given(st.lists(SHRINKS | GROWS, max_size=3))
def test_what_is_rendered_parses_back(passes: list[Pass]) -> None:
    text = render(passes)

    back = parse(text, lookup)

    assert back == tuple(passes)
    assert repr(back) == repr(tuple(passes))  # 1, 1.0 and True are equal, and not the same option
    assert render(back) == text


@given(st.text(alphabet="shrinkevery{}[]=,'\" 1.-", max_size=30))
def test_any_text_parses_or_is_a_spec_error(text: str) -> None:
    try:
        parse(text, lookup)
    except SpecError as error:
        assert "^" in str(error)  # noqa: PT017 - the text may also parse


def test_options_equal_to_their_defaults_are_left_out() -> None:
    passes = [Shrink(), Shrink(every=2, policy="sqrt"), Grow(times=3)]

    assert render(passes) == "shrink,shrink{policy=sqrt,every=2},grow-up{times=3}"


def test_a_pass_prints_as_its_spec() -> None:
    assert str(Shrink(select=("layer.[0-5]", "[ab]"))) == 'shrink{select=[layer.[0-5],"[ab]"]}'
    assert str(Shrink(budget="6GiB", select=("a b", "c.*"))) == 'shrink{budget=6GiB,select=["a b",c.*]}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        (" shrink { every = 2 } , shrink ", (Shrink(every=2), Shrink())),
        ("shrink{}", (Shrink(),)),
        ("shrink{budget=6GiB}", (Shrink(budget="6GiB"),)),
        ("shrink{budget=6}", (Shrink(budget=6),)),
        ("shrink{budget='6'}", (Shrink(budget="6"),)),
        ("shrink{budget=none,strict=true}", (Shrink(strict=True),)),
        ("shrink{ratio=2}", (Shrink(ratio=2.0),)),
        ("shrink{ratio=inf}", (Shrink(ratio=math.inf),)),
        ("shrink{select=encoder.*}", (Shrink(select=("encoder.*",)),)),
        ("shrink{select=encoder.layer.[0-5]}", (Shrink(select=("encoder.layer.[0-5]",)),)),
        ("shrink{select=[a.[0-5].b,c]}", (Shrink(select=("a.[0-5].b", "c")),)),
        ("shrink{select=[1,'b c']}", (Shrink(select=("1", "b c")),)),
        ("shrink{sizes=[[1,2],[3,4.5]]}", (Shrink(sizes=((1, 2.0), (3, 4.5))),)),
    ],
)
def test_values_take_the_type_of_their_option(text: str, expected: tuple[Pass, ...]) -> None:
    assert repr(parse(text, lookup)) == repr(expected)


@pytest.mark.parametrize(
    ("text", "column", "cause", "next_step"),
    [
        ("shrink,", 7, "expected the name of a pass, found the end", "write passes as"),
        ("shrink{every=2", 14, 'expected "," or "}" after the option, found the end', "write passes as"),
        ("shrink{every 2}", 13, 'expected "=" and a value after every, found "2"', "write passes as"),
        ("shrink{every=}", 13, 'expected a value, found "}"', "write passes as"),
        ("shrink{select=[a", 16, 'expected "," or "]" after the list\'s value, found the end', "write passes as"),
        ('shrink{budget="6}', 14, "the quoted string is broken", 'close it with "'),
        ("shrnk", 0, "no pass is called 'shrnk'", "look again"),
        ("shrink{evry=2}", 7, "shrink has no option 'evry'; its options are policy, every,", "did you mean `every`?"),
        ("shrink{xyz=2}", 7, "shrink has no option 'xyz'", "`rewrite passes shrink` describes its options"),
        ("shrink{every=x}", 13, "every takes int, not x", "`rewrite passes shrink`"),
        ("shrink{every=true}", 13, "every takes int, not true", "`rewrite passes shrink`"),
        ("shrink{every=2.5}", 13, "every takes int, not 2.5", "`rewrite passes shrink`"),
        ("shrink{strict=1}", 14, "strict takes bool, not 1", "`rewrite passes shrink`"),
        ("shrink{policy=sqr}", 14, "policy takes blocks | sqrt | none | 3, not sqr", "did you mean `policy=sqrt`?"),
        ("shrink{every=1,every=2}", 15, "every is given twice", "keep one of the two"),
        ("shrink{sizes=[[1]]}", 13, "sizes takes list of [int, float], not [[1]]", "`rewrite passes shrink`"),
        ("shrink,grow-up", 7, "grow-up needs a value for times", "write `grow-up{times=...}`"),
        ("grow-up{times=-1}", 0, "times must not be negative", "`rewrite passes grow-up`"),
    ],
)
def test_malformed_text_is_shown_with_a_caret_at_the_place(text: str, column: int, cause: str, next_step: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text, lookup)

    first, *_, shown, caret, last = str(caught.value).split("\n")
    assert cause in first
    assert shown == f"    {text}"
    assert caret == f"    {' ' * column}^"
    assert next_step in last


def test_a_long_spec_is_cut_around_the_fault() -> None:
    text = ",".join(["shrink"] * 100) + ",shrnk," + ",".join(["shrink"] * 100)

    with pytest.raises(SpecError) as caught:
        parse(text, lookup)

    _, shown, caret, _ = str(caught.value).split("\n")
    assert len(shown) <= 80
    assert shown[caret.index("^") :].startswith("shrnk,")


def test_a_value_that_no_spec_can_say_is_named() -> None:
    with pytest.raises(SpecError, match="anything is a dict, which a spec cannot say"):
        render([Shrink(anything={"a": 1})])
