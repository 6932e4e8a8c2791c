from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewrite.errors import InputError
from rewrite.report.sizes import delta_text, dtype_text, flops_text, parse_bytes, percent_text, shape_text, size_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024, "10.0 KiB"),
        (100 * 1024, "100 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (3 * 1024**3 // 2, "1.50 GiB"),
        (-5 * 1024**2, "-5.00 MiB"),
        (2000 * 1024**5, "2000 PiB"),
    ],
)
def test_bytes_as_text(count: int, text: str) -> None:
    assert size_text(count) == text


def test_a_delta_always_has_a_sign() -> None:
    assert (delta_text(0), delta_text(2048), delta_text(-2048)) == ("+0 B", "+2.00 KiB", "-2.00 KiB")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 * 1024**3),
        ("512 MiB", 512 * 1024**2),
        ("1.5g", 3 * 1024**3 // 2),
        ("24GB", 24 * 10**9),
        ("100", 100),
        ("7 b", 7),
        ("2kib", 2048),
    ],
)
def test_text_as_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "3zb", "1 2", "1e3"])
def test_text_that_is_no_size(text: str) -> None:
    with pytest.raises(InputError, match="is no number of bytes"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=2**60))
def test_text_and_bytes_agree_to_the_digits_shown(count: int) -> None:
    assert abs(parse_bytes(size_text(count)) - count) <= max(1, count * 0.0051)


def test_other_figures() -> None:
    assert flops_text(0) == "0 FLOP"
    assert flops_text(1_234_000_000_000) == "1.23 TFLOP"
    assert flops_text(-999_600) == "-1 MFLOP"
    assert percent_text(-1, 4) == "-25.0%"
    assert percent_text(1, 0) == ""
    assert shape_text((1, 2, 3)) == "1x2x3"
    assert shape_text(()) == "scalar"
    assert dtype_text("torch.bfloat16") == "bf16"
    assert dtype_text("float8_e4m3fn") == "float8_e4m3fn"
