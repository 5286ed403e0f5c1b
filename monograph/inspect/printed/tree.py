"""Trees of tagged lines, such as `(MODULE:model.0:Linear(4, 8)): (`, and how they are laid out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

WIDTH = 120
_LEAST = 60  # columns for the text itself, however deep it stands
_CONTINUED = " " * 7  # torch's own indent inside `tensor(`
_BREAK = re.compile(r"(?<=,) (?=\D)| (?=->)")  # after commas, but not those of a shape


@dataclass(frozen=True)
class Entry:
    """A line `(label)`; with children, which may be none, it opens a block: `(label): (`."""

    label: str
    children: tuple[Entry, ...] | None = None
    note: str = ""  # stands in the place of the children, in words


def layout(entry: Entry, depth: int = 0) -> Iterator[str]:
    """The lines of a tree, two spaces of indent for each level."""
    indent = "  " * depth
    if entry.note:
        yield from wrapped(f"({entry.label}): ({entry.note})", indent)
    elif entry.children is None:
        yield from wrapped(f"({entry.label})", indent)
    elif not entry.children:
        yield from wrapped(f"({entry.label}): ()", indent)
    else:
        yield from wrapped(f"({entry.label}): (", indent)
        for child in entry.children:
            yield from layout(child, depth + 1)
        yield f"{indent})"


def wrapped(text: str, indent: str) -> Iterator[str]:
    """`text` broken after commas where it is too wide, or after a bracket where that does not help."""
    width = max(WIDTH, len(indent) + _LEAST)
    first, *pieces = _BREAK.split(text)
    line = indent + first
    if len(line) > width and "(" in first[1:]:
        name, _, rest = first.rpartition("(")
        yield f"{indent}{name}("
        line = f"{indent}{_CONTINUED}{rest}"
    for piece in pieces:
        if len(line) + len(piece) + 1 > width:
            yield line
            line = f"{indent}{_CONTINUED}{piece}"
        else:
            line = f"{line} {piece}"
    yield line
