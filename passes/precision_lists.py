"""Which operators run in half precision: the rows of `precision_lists.csv`, each with its source.

The colours are those of TensorFlow's auto_mixed_precision: *allow* gains from half precision and is safe in it, *deny*
is not safe in it or leads what follows astray, *infer* is safe where its surroundings are, *clear* changes no value or
none that matters. An operator that no row names stays in single precision.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Iterator, Mapping
from importlib import resources

ALLOW, INFER, DENY, CLEAR = "allow", "infer", "deny", "clear"
COLOURS = (ALLOW, INFER, DENY, CLEAR)


@functools.cache
def colours() -> Mapping[str, str]:
    """Operator name -> colour. A layer of torch is named `nn.Linear`, a function or method by its bare name."""
    return {name: colour for colour, names, _ in rows() for name in names}


def rows() -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Colour, operators and source of each row."""
    text = (resources.files("passes") / "precision_lists.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(text.splitlines()):
        yield row["colour"], tuple(row["operators"].split()), row["source"]
