"""The one place that turns bytes, operations and shapes into text, and text into bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rewrite.errors import InputError

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BINARY = {unit.upper(): 1024**power for power, unit in enumerate(UNITS) if power}
BINARY |= {unit[0].upper(): 1024**power for power, unit in enumerate(UNITS) if power}
DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "complex64": "c64",
}


def size_text(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1: `1.50 GiB`, `512 B`; the sign is kept."""
    sign, rest = ("-", -count) if count < 0 else ("", count)
    if rest < 1024:
        return f"{sign}{rest} B"
    power = next((power for power in range(1, len(UNITS)) if rest < 1024 ** (power + 1) * 0.9995), len(UNITS) - 1)
    scaled = rest / 1024**power
    digits = 2 if scaled < 10 else 1 if scaled < 100 else 0
    return f"{sign}{scaled:.{digits}f} {UNITS[power]}"


def delta_text(count: int) -> str:
    """Bytes with a sign that is always there: `-1.50 GiB`, `+512 B`, `+0 B`."""
    return size_text(count) if count < 0 else f"+{size_text(count)}"


def percent_text(part: int | float, whole: int | float) -> str:
    """How `part` stands to `whole`, signed: `-63.4%`; empty where there is no whole."""
    return f"{100 * part / whole:+.1f}%" if whole else ""


def parse_bytes(text: str) -> int:
    """`8GiB`, `512 MiB`, `8G` (binary), `24GB` (decimal) or a plain number as bytes. Raises `InputError`."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = found.group(2).upper() if found else ""
    if found is None or unit not in DECIMAL | BINARY:
        raise InputError(f"size {text!r}", "is no number of bytes", "write 8GiB, 512MiB or a plain number")
    return int(float(found.group(1)) * (DECIMAL | BINARY)[unit])


def flops_text(count: int) -> str:
    """Floating point operations: `1.23 TFLOP`."""
    scaled, prefixes = float(abs(count)), ["", "K", "M", "G", "T", "P", "E"]
    while scaled >= 999.5 and len(prefixes) > 1:
        scaled, prefixes = scaled / 1000, prefixes[1:]
    number = f"{scaled:.3g}" if scaled < 1000 else f"{scaled:.0f}"
    return f"{'-' if count < 0 else ''}{number} {prefixes[0]}FLOP"


def shape_text(shape: Sequence[int]) -> str:
    """`1x4096x4096`; `scalar` for a tensor without dimensions."""
    return "x".join(str(size) for size in shape) if shape else "scalar"


def dtype_text(dtype: str) -> str:
    """A dtype in at most four letters where it is a common one: `float32` as `f32`."""
    return DTYPES.get(dtype.removeprefix("torch."), dtype.removeprefix("torch."))
