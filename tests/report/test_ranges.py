from __future__ import annotations

import pytest

from rewrite.report.ranges import fold_paths, natural_order


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        (["h.0", "h.1", "h.2"], "h.0-2"),
        (["h.2", "h.0", "h.1", "h.7"], "h.0-2,7"),
        (["a.layer.0.mlp", "a.layer.1.mlp"], "a.layer.0-1.mlp"),
        (["enc.0", "enc.1", "dec.0"], "enc.0-1, dec.0"),
        (["s.0.b.0", "s.0.b.1", "s.1.b.0"], "s.0.b.0-1, s.1.b.0"),
        (["", "head"], "(root), head"),
        (["0", "2"], "0,2"),
        ([], ""),
    ],
)
def test_paths_fold(paths: list[str], text: str) -> None:
    assert fold_paths(paths) == text


def test_numbers_sort_as_numbers() -> None:
    assert sorted(["h.10", "h.2", "a"], key=natural_order) == ["a", "h.2", "h.10"]
