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
