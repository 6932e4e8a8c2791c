"""Fenced code of the repository's documents, for the tests that run it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def marked_block(document: str, mark: str) -> str:
    """The fenced block that follows the line `<!-- mark -->`, without its indentation."""
    text = (ROOT / document).read_text()
    found = re.search(rf"^( *)<!-- {re.escape(mark)} -->\n\1```\w*\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"{document} has no block marked {mark!r}"
    indent = found.group(1)
    return "".join(line.removeprefix(indent) for line in found.group(2).splitlines(keepends=True))


def python_blocks(document: str) -> list[str]:
    """Every unmarked fenced Python block."""
    return re.findall(r"(?<!-->\n)^```python\n(.*?)^```$", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
