"""How what a user asks for is shown: a line in a session of Python, its text by print(), the text up to a limit in a cell."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final, TypeVar

_Row = TypeVar("_Row")

_LINES: Final = 60  # in a cell
_COLUMNS: Final = 160
_STYLE: Final = (  # a page of Jupyter has another font for what a cell gives
    "font-family: monospace; white-space: pre; overflow-x: auto; line-height: 1.35; margin: 0; text-align: left"
)
_FEW_LINES: Final = 20
_UNITS: Final = {
    "bytes": 1,
    **{f"{letter}ib": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}b": 10 ** (3 * power) for power, letter in enumerate("kmgt", 1)},
}
_BYTES: Final = re.compile(r"(\d{1,15}(?:\.\d{1,15})?) ?(bytes|[kmgt]i?b)", re.ASCII | re.IGNORECASE)


class Displayed:
    """What users look at. A class that is Displayed has a `__str__`, and a dataclass is one with `repr=False`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return one_line(type(self).__name__, str(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(clipped(str(self)))

    def _repr_html_(self) -> str:
        return pre(str(self))


class Brief(Displayed):
    """What is Displayed, and its own text by `repr()` where that has few lines, as a model's is."""

    __slots__ = ()

    def __repr__(self) -> str:
        text = str(self)
        return text if len(text.splitlines()) <= _FEW_LINES else one_line(type(self).__name__, text)


class Text(Displayed, str):
    """A string that print() shows, and a cell with its lines as lines."""

    __slots__ = ()

    def __str__(self) -> str:
        return str.__str__(self)


class Rows(Displayed, tuple[_Row, ...]):
    """Records: a tuple of them that is a line, prints as a line for each, and fits into a cell."""

    __slots__ = ()

    def __repr__(self) -> str:
        if not self:
            return "<Rows: empty>"
        return f"<{count_text(len(self), 'row')}: {shortened(str(self[0]))}{', ...' * (len(self) > 1)}>"

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def one_line(name: str, text: str) -> str:
    """`<Text of 57 lines: ...; print() shows it>`: the first line of a text, and how much there is."""
    first, count = shortened(text), len(text.splitlines())
    if count < 2 and first == text:
        return f"<{name}: {text}>" if text else f"<{name}: empty>"
    return f"<{name} of {count_text(count, 'line')}: {first.rstrip(':')}; print() shows it>"


def clipped(text: str, lines: int = _LINES) -> str:
    """A text that fits into a cell: its first lines, as wide as a screen, and how many there are besides."""
    found = text.splitlines()
    shown = [line if len(line) <= _COLUMNS else f"{line[: _COLUMNS - 1]}…" for line in found[:lines]]
    left = len(found) - lines
    return "\n".join(
        [*shown, *([f"... {count_text(left, 'more line')}: print() shows all"] if left > 0 else [])]
    )


def pre(text: str) -> str:
    """A text as HTML for a cell, up to a limit; wide lines are scrolled."""
    return f'<pre style="{_STYLE}">{html.escape(clipped(text))}</pre>'


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


def bytes_in(text: str) -> int | None:
    """The number in a text such as "2 GiB", "1.5MB" or "512 bytes", with as many decimal places as wanted; None for another text."""
    found = _BYTES.fullmatch(text)
    if found is None:
        return None
    return int(Decimal(found[1]) * _UNITS[found[2].lower()])


def bytes_texts(*counts: int) -> list[str]:
    """Numbers of bytes that are to be told apart: with all their digits where two would read the same."""
    texts = list(map(bytes_text, counts))
    if len(set(texts)) == len(set(counts)):
        return texts
    return [
        text if text.endswith(" bytes") else f"{text} ({n:,} bytes)"
        for text, n in zip(texts, counts, strict=True)
    ]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, numbers to the right."""
    widths = [max(len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]
    lines = []
    for row in (columns, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
