"""How what a user asks for shows itself as the last expression of a cell, or in a session of Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Text(str):
    """A string that is shown as it prints, with its lines as lines."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return str.__str__(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))


def shortened(text: str, length: int = 100) -> str:
    """The first line of a text, cut off if it is long."""
    line = text.partition("\n")[0]
    return line if len(line) <= length else f"{line[: length - 3]}..."


def count_text(number: int, noun: str) -> str:
    """1 op, 2 ops"""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def bytes_text(count: int) -> str:
    """A number of bytes in the unit that leaves few digits."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{count} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, numbers to the right."""
    widths = [max(len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]
    lines = []
    for row in (columns, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
