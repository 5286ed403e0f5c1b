"""Pictures of rectangles and texts, as SVG or as PNG."""

from __future__ import annotations

import html
import struct
import zlib
from dataclasses import dataclass, field
from typing import Final

from monograph.inspect.memory.letters import COLUMNS

_SCALE: Final = 2  # pixels of a PNG for one of a picture
_ADVANCE: Final = 6  # from letter to letter
_LETTER_HEIGHT: Final = 7
_INK: Final = "#1d2126"


@dataclass(frozen=True)
class Rectangle:
    """A filled rectangle; `note` is shown where the pointer rests on it."""

    x: float
    y: float
    width: float
    height: float
    color: str
    note: str = ""


@dataclass(frozen=True)
class Label:
    """A line of text that begins at x, or ends there with `at_end`; y is its foot."""

    x: float
    y: float
    text: str
    color: str = _INK
    at_end: bool = False


@dataclass
class Picture:
    """What is drawn, in its order, on white ground."""

    width: int
    height: int
    rectangles: list[Rectangle] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)

    def svg(self) -> str:
        """The picture as a file for browsers."""
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="sans-serif" font-size="11">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
        ]
        for item in self.rectangles:
            note = f"<title>{html.escape(item.note)}</title>" if item.note else ""
            lines.append(
                f'<rect x="{item.x:.6g}" y="{item.y:.6g}" width="{item.width:.6g}" height="{item.height:.6g}" '
                f'fill="{item.color}">{note}</rect>'
            )
        for text in self.labels:
            anchor = ' text-anchor="end"' if text.at_end else ""
            lines.append(
                f'<text x="{text.x:.6g}" y="{text.y:.6g}" fill="{text.color}"{anchor}>{html.escape(text.text)}</text>'
            )
        return "\n".join([*lines, "</svg>"]) + "\n"

    def png(self) -> bytes:
        """The picture as pixels."""
        canvas = _Canvas(self.width * _SCALE, self.height * _SCALE)
        for item in self.rectangles:
            corners = item.x, item.y, item.x + item.width, item.y + item.height
            left, top, right, bottom = (round(_SCALE * side) for side in corners)
            canvas.fill(left, top, max(right, left + 1), max(bottom, top + 1), _rgb(item.color))
        for text in self.labels:
            start = text.x - (len(text.text) * _ADVANCE if text.at_end else 0)
            place = round(_SCALE * start), round(_SCALE * (text.y - _LETTER_HEIGHT))
            canvas.write(*place, text.text, _rgb(text.color))
        return canvas.encoded()


class _Canvas:
    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.rows = [bytearray(b"\xff" * (3 * width)) for _ in range(height)]

    def fill(self, left: int, top: int, right: int, bottom: int, color: bytes) -> None:
        """Fill what is within the canvas."""
        left, right = max(left, 0), min(right, self.width)
        if left < right:
            for row in self.rows[max(top, 0) : max(bottom, 0)]:
                row[3 * left : 3 * right] = color * (right - left)

    def write(self, left: int, top: int, text: str, color: bytes) -> None:
        """Draw letters dot by dot; one that there is no form of is a question mark."""
        for index, letter in enumerate(text):
            for column, bits in enumerate(COLUMNS.get(letter, COLUMNS["?"])):
                x = left + (index * _ADVANCE + column) * _SCALE
                for row in range(8):
                    if bits >> row & 1:
                        self.fill(x, top + row * _SCALE, x + _SCALE, top + (row + 1) * _SCALE, color)

    def encoded(self) -> bytes:
        """The file: a header, the rows one after the other, the end."""
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        pixels = zlib.compress(b"".join(b"\0" + row for row in self.rows), 9)
        chunks = (_chunk(b"IHDR", header), _chunk(b"IDAT", pixels), _chunk(b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _rgb(color: str) -> bytes:
    return bytes.fromhex(color.removeprefix("#"))
