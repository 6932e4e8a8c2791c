"""Module path globs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewrite.selectors import matches

COMPONENTS = st.sampled_from(["a", "b", "layer", "0", "11"])
PATHS = st.lists(COMPONENTS, min_size=1, max_size=4).map(".".join)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("encoder", "encoder"),
        ("encoder", "encoder.layer.0.mlp"),
        ("encoder.*", "encoder.layer"),
        ("encoder.layer.*.mlp", "encoder.layer.3.mlp"),
        ("encoder.layer.*.mlp", "encoder.layer.3.mlp.dense"),
        ("layers.[0-5]", "layers.4"),
        ("layers.[!0-5]", "layers.7"),
        ("layers.[0-11]", "layers.0"),
        ("layers.[0-11]", "layers.7.mlp"),
        ("layers.[0-11]", "layers.11"),
        ("layers.[8-11]", "layers.9"),
        ("layers.[10-12]", "layers.11"),
        ("layers.[!8-11]", "layers.12"),
        ("layer[2-11]_*", "layer10_mlp"),
        ("h.1[0-5]", "h.12"),
        ("**.[2-11].mlp", "encoder.layer.10.mlp"),
        ("layers.[135]", "layers.3"),
        ("layers.1?", "layers.12"),
        ("*.attention", "layer0.attention"),
        ("**.mlp", "mlp"),
        ("**.mlp", "model.layers.0.mlp"),
        ("model.**.mlp", "model.mlp"),
        ("model.**.mlp", "model.layers.0.mlp"),
        ("**", "anything.at.all"),
        ("layers.*.{a}", "layers.0.{a}"),
    ],
)
def test_selects(pattern: str, path: str) -> None:
    assert matches(pattern, path)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("encoder", "encoders"),
        ("encoder.layer", "encoder"),
        ("encoder.*.mlp", "encoder.layer.3.mlp"),
        ("encoder.layer.*", "encoder.layer"),
        ("layers.[0-5]", "layers.12"),
        ("layers.[0-11]", "layers.12"),
        ("layers.[0-11]", "layers.110"),
        ("layers.[8-11]", "layers.1"),
        ("layers.[10-12]", "layers.0"),
        ("layers.[10-12]", "layers.2"),
        ("layers.[!8-11]", "layers.9"),
        ("layers.[11-0]", "layers.5"),
        ("layers.[0-11]", "layers.x"),
        ("layers.[0-11]", "layers.-1"),
        ("mlp", "model.mlp"),
        ("**.mlp", "model.mlps"),
        ("Encoder", "encoder"),
        ("*", ""),
        ("", "encoder"),
        ("encoder.", "encoder"),
    ],
)
def test_leaves_alone(pattern: str, path: str) -> None:
    assert not matches(pattern, path)


@given(PATHS, PATHS)
def test_a_path_selects_itself_and_what_is_below(path: str, below: str) -> None:
    assert matches(path, path)
    assert matches(path, f"{path}.{below}")
    assert not matches(f"{path}.{below}", path)


@given(PATHS)
def test_stars_select_by_number_of_components(path: str) -> None:
    length = path.count(".") + 1
    assert matches(".".join("*" * length), path)
    assert not matches(".".join("*" * (length + 1)), path)
    assert matches("**", path)
    assert matches(f"**.{path.rpartition('.')[2]}", path)


@given(st.integers(0, 40), st.integers(10, 140))
def test_a_range_is_one_of_numbers(first: int, last: int) -> None:
    found = [number for number in range(150) if matches(f"layers.[{first}-{last}]", f"layers.{number}.mlp")]
    assert found == list(range(first, last + 1))
