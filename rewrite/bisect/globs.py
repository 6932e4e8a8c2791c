"""Few selectors for many operators."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from rewrite.selectors import matches


class Globs:
    """Says parts of a given set of paths as selectors."""

    def __init__(self, paths: Collection[str]) -> None:
        self.paths = tuple(paths)
        self._below: dict[str, set[str]] = {}
        self._exact: dict[str, bool] = {}
        for path in self.paths:
            for glob in _wider(path):
                self._below.setdefault(glob, set()).add(path)

    def of(self, chosen: Collection[str]) -> tuple[str, ...]:
        """Selectors that match every path in `chosen`, and no other of the set.

        A module stands for all of its operators, `*` for every number in its place.
        """
        wanted, said, found = set(chosen), set[str](), []
        for path in chosen:
            if path in said:
                continue
            fits = (glob for glob in self._telling(path) if self._below[glob] <= wanted)
            selector = next(glob for glob in fits if self._is_exact(glob))
            found.append(selector)
            said |= self._below[selector]
        return tuple(found)

    def _telling(self, path: str) -> Iterator[str]:
        """Ways to say `path`, without those that leave a number open and select no more for it."""
        ways = list(_wider(path))
        for glob, narrower in zip(ways, [*ways[1:], ""], strict=True):
            if "*" not in glob or self._below[glob] != self._below[narrower]:
                yield glob

    def _is_exact(self, glob: str) -> bool:
        """Whether a selector matches what it was made of alone: `*` stands for names as well as for numbers."""
        if glob not in self._exact:
            hits = {path for path in self.paths if matches(glob, path)}
            self._exact[glob] = hits == self._below[glob]
        return self._exact[glob]


def _wider(path: str) -> Iterator[str]:
    """Ways to say `path`, the widest first: with fewer components, and with numbers left open."""
    parts = path.split(".")
    for length in range(1, len(parts) + 1):
        head = parts[:length]
        starred = ["*" if part.isdigit() else part for part in head]
        if starred != head:
            yield ".".join(starred)
        yield ".".join(head)
