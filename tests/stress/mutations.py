"""What a mutation of the package is, and where it stands in a tree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """A fault that somebody could make: a text of the package, and another in its place."""

    area: str  # the folder of monograph/, or the file at its top
    before: str  # stands once in the package
    after: str
    tests: tuple[str, ...]  # tried first: folders, files or patterns below tests/
    file: str = ""  # without `.py`, where the text stands in several
    was: str = ""  # how it was worded in an older tree, if otherwise
    is_new: bool = False  # what it breaks is not in the older tree

    def __str__(self) -> str:
        lines = [line.strip() for line in self.before.strip().splitlines()]
        return f"{self.area}: {' '.join(lines)[:90]}"


class Misplaced(Exception):
    """A text of a mutation does not stand once in the package."""


class Package:
    """The sources of a tree's package."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def _texts(self) -> dict[str, str]:
        package = self.root / "monograph"
        files = sorted(path for path in package.rglob("*.py") if "__pycache__" not in path.parts)
        return {path.relative_to(package).with_suffix("").as_posix(): path.read_text() for path in files}

    def mutated(self, mutation: Mutation) -> tuple[Path, str]:
        """The file that a mutation is put into, and its new text."""
        for before in filter(None, (mutation.before, mutation.was)):
            places = [name for name in self._names(mutation) for _ in range(self._texts[name].count(before))]
            if len(places) == 1:
                new = self._texts[places[0]].replace(before, mutation.after)
                return self.root / "monograph" / f"{places[0]}.py", new
            if places:
                raise Misplaced(f"{mutation}: stands {len(places)} times: {', '.join(dict.fromkeys(places))}")
        raise Misplaced(f"{mutation}: does not stand in the package")

    def _names(self, mutation: Mutation) -> list[str]:
        return [mutation.file] if mutation.file in self._texts else list(self._texts)
