from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Literal

import pytest

from rewrite import registry, spec
from rewrite.contract import Numerics
from rewrite.errors import PassError, SpecError
from rewrite.options import Option

TRIM = """
    from dataclasses import dataclass
    from typing import ClassVar, Literal

    from rewrite.contract import Numerics, Pass, PassResult


    @dataclass(frozen=True)
    class Trim(Pass):
        '''Trims things.

        More about it.
        '''

        name: ClassVar[str] = "trim"
        numerics: ClassVar[Numerics] = Numerics.EXACT

        side: Literal["left", "right"] = "left"
        '''Which side.'''
        by: int = 2

        def apply(self, program):
            return PassResult(program, modified=False)
"""


class Site:
    """A folder on `sys.path` to which distributions are installed as pip does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, distribution: str, point: str, module: str, source: str) -> None:
        (self.folder / f"{module}.py").write_text(textwrap.dedent(source))
        info = self.folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[rewrite.passes]\n{point}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.syspath_prepend(tmp_path)
    return Site(tmp_path)


def test_a_third_party_pass_is_found_loaded_and_parsed(site: Site) -> None:
    site.install("trim-tools", "trim = third_party_trim:Trim", "third_party_trim", TRIM)

    (pass_,) = spec.parse("trim{by=3}", registry.load)

    assert "trim" in registry.names()
    assert type(pass_).__module__ == "third_party_trim"
    assert str(pass_) == "trim{by=3}"


def test_description_has_docs_options_and_distribution(site: Site) -> None:
    site.install("trim-tools", "trim = third_party_trim:Trim", "third_party_trim", TRIM)

    about = registry.describe("trim")

    side, by = about.options
    assert (about.distribution, about.summary, about.numerics) == ("trim-tools", "Trims things.", Numerics.EXACT)
    assert "More about it." in about.doc
    assert side == Option("side", Literal["left", "right"], "left", "Which side.")
    assert by == Option("by", int, 2, "")
    assert about.fault == ""


def test_an_unknown_name_lists_the_passes_and_suggests_one(site: Site) -> None:
    site.install("trim-tools", "trim = third_party_trim:Trim", "third_party_trim", TRIM)

    with pytest.raises(SpecError) as caught:
        spec.parse("trm", registry.load)

    assert "no pass is called 'trm'; there are " in str(caught.value)
    assert "Next: did you mean `trim`?" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import no_such_module_of_ours", "cannot be imported: ModuleNotFoundError"),
        ("raise RuntimeError('boom')", "cannot be imported: RuntimeError: boom"),
        ("Other = 1", "cannot be imported: AttributeError"),
        ("class Trim: pass", "is not a subclass of rewrite.Pass"),
        (TRIM.replace('= "trim"', '= "cut"'), "calls itself 'cut', not 'trim'"),
        (TRIM.replace("(frozen=True)", "").replace("@dataclass", ""), "is not decorated with @dataclass(frozen=True)"),
        (TRIM.replace("def apply", "def do"), "does not define apply()"),
        (TRIM.replace(" = Numerics.EXACT", ""), "does not say its `numerics`"),
    ],
)
def test_a_broken_pass_is_named_with_its_distribution_while_others_load(site: Site, source: str, fault: str) -> None:
    module = f"broken_{abs(hash(source))}"
    site.install("broken-tools", f"trim = {module}:Trim", module, source)
    site.install("good-tools", "cut = good_cut:Trim", "good_cut", TRIM.replace('= "trim"', '= "cut"'))

    with pytest.raises(PassError) as caught:
        registry.load("trim")

    assert "of distribution broken-tools" in str(caught.value)
    assert fault in str(caught.value)
    assert fault in registry.describe("trim").fault
    assert registry.describe("trim").distribution == "broken-tools"
    assert registry.load("cut").name == "cut"


def test_two_distributions_with_one_name_are_both_named(site: Site) -> None:
    site.install("trim-tools", "trim = third_party_trim:Trim", "third_party_trim", TRIM)
    site.install("other-tools", "trim = other_trim:Trim", "other_trim", TRIM)

    with pytest.raises(PassError, match="other-tools and trim-tools each ship a pass of this name"):
        registry.load("trim")

    assert registry.describe("trim").fault
