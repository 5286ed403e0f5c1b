"""Where the boxes of a drawing are: rows from what is read to what is made, frames around modules, lanes beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from monograph.inspect.pages.boxes import Arrow, Box

LINE, LETTER, _BOLD = 14, 6.3, 7.2  # the height of a line, and the widths of letters
WIDEST: Final = 40  # letters of a line
_PAD, _GAP_X, _GAP_Y, _HEAD, _LANE = 10, 16, 30, 20, 12


@dataclass
class Placed:
    """A box with its place in the frame that it is in, and what is in it."""

    box: Box
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0
    inside: list[Placed] = field(default_factory=list)
    paths: list[tuple[Arrow, str]] = field(default_factory=list)  # in its own coordinates


def placed(box: Box) -> Placed:
    """A box with all that is in it, in places."""
    if not box.boxes:
        return Placed(box, max(90.0, _width(box.lines)), 10.0 + LINE * len(box.lines))
    inside = {inner.name: placed(inner) for inner in box.boxes}
    rows = _rows(list(inside), box.arrows)
    _set_places(rows, inside, box.arrows)
    right = max(item.x + item.width for item in inside.values())
    bottom = max(item.y + item.height for item in inside.values())
    lanes = _Lanes(rows, inside, box.arrows)
    paths = [(arrow, lanes.path(arrow)) for arrow in box.arrows]
    right = max([right, *lanes.used])
    return Placed(
        box, max(right + _PAD, _width(box.lines)), bottom + _PAD, inside=list(inside.values()), paths=paths
    )


def _width(lines: Sequence[str]) -> float:
    """What lines need; the first is bold."""
    title, *others = (min(len(line), WIDEST) for line in lines)
    return 16 + max([_BOLD * title, *(LETTER * count for count in others)])


def _rows(names: Sequence[str], arrows: Sequence[Arrow]) -> list[list[str]]:
    """Rows by the longest way from a box that reads none; one of those is right above the first that reads it."""
    sources: dict[str, list[str]] = defaultdict(list)
    readers: dict[str, list[str]] = defaultdict(list)
    for arrow in arrows:
        sources[arrow.end].append(arrow.start)
        readers[arrow.start].append(arrow.end)
    level: dict[str, int] = {}
    pending = list(names)
    while pending:  # boxes from outside are the last of the names
        ready = [name for name in pending if all(source in level for source in sources[name])]
        assert ready, "modules that read each other are drawn as several boxes"
        for name in ready:
            level[name] = max((level[source] + 1 for source in sources[name]), default=0)
        pending = [name for name in pending if name not in level]
    for name in names:
        if not sources[name] and readers[name]:
            level[name] = max(min(level[reader] for reader in readers[name]) - 1, 0)
    rows: dict[int, list[str]] = defaultdict(list)
    for name in names:
        rows[level[name]].append(name)
    return [rows[number] for number in sorted(rows)]


def _set_places(rows: Sequence[Sequence[str]], inside: Mapping[str, Placed], arrows: Sequence[Arrow]) -> None:
    """Each box as near as can be to the middle of what it reads."""
    sources: dict[str, list[str]] = defaultdict(list)
    for arrow in arrows:
        sources[arrow.end].append(arrow.start)
    middle: dict[str, float] = {}
    y = float(_HEAD + _PAD)
    for row in rows:
        wanted = {}
        for name in row:
            known = [middle[source] for source in sources[name] if source in middle]
            wanted[name] = sum(known) / len(known) if known else 0.0
        ordered = sorted(row, key=wanted.__getitem__)
        right = float("-inf")
        for name in ordered:
            item = inside[name]
            item.x = max(wanted[name] - item.width / 2, right)
            right = item.x + item.width + _GAP_X
        shift = sum(inside[name].x + inside[name].width / 2 - wanted[name] for name in ordered) / len(ordered)
        for name in ordered:
            item = inside[name]
            item.x, item.y = item.x - shift, y
            middle[name] = item.x + item.width / 2
        y += max(inside[name].height for name in row) + _GAP_Y
    left = min(item.x for item in inside.values())
    for item in inside.values():
        item.x += _PAD - left


class _Lanes:
    """The ways of arrows: straight to the next row, and beside the rows in between to a later one."""

    def __init__(
        self, rows: Sequence[Sequence[str]], inside: Mapping[str, Placed], arrows: Sequence[Arrow]
    ) -> None:
        self._inside = inside
        self._row = {name: number for number, row in enumerate(rows) for name in row}
        self._out: dict[str, list[Arrow]] = defaultdict(list)
        self._into: dict[str, list[Arrow]] = defaultdict(list)
        for arrow in arrows:
            self._out[arrow.start].append(arrow)
            self._into[arrow.end].append(arrow)
        self._right = [max(inside[name].x + inside[name].width for name in names) for names in rows]
        self._bottom = [max(inside[name].y + inside[name].height for name in names) for names in rows]
        self._taken: list[tuple[int, int, float]] = []  # rows from, to, and where
        self._lanes: dict[str, float] = {}

    @property
    def used(self) -> list[float]:
        """The lanes."""
        return [x for _, _, x in self._taken]

    def path(self, arrow: Arrow) -> str:
        """The way of an arrow, as SVG has it."""
        start, end = self._inside[arrow.start], self._inside[arrow.end]
        out, into = self._out[arrow.start], self._into[arrow.end]
        x1 = start.x + start.width * (out.index(arrow) + 1) / (len(out) + 1)
        x2 = end.x + end.width * (into.index(arrow) + 1) / (len(into) + 1)
        y1, y2 = start.y + start.height, end.y
        first, last = self._row[arrow.start], self._row[arrow.end]
        if last - first < 2:
            bottom = max(self._bottom[first], y1)  # down beside what is in the same row
            middle = (bottom + y2) / 2
            curve = f"C{x1:.0f},{middle:.0f} {x2:.0f},{middle:.0f} {x2:.0f},{y2:.0f}"
            return f"M{x1:.0f},{y1:.0f} L{x1:.0f},{bottom:.0f} {curve}"
        x = self._lane(arrow.start)
        return (
            f"M{x1:.0f},{y1:.0f} C{x1:.0f},{y1 + 18:.0f} {x:.0f},{y1 + 4:.0f} {x:.0f},{y1 + 26:.0f} "
            f"L{x:.0f},{y2 - 26:.0f} C{x:.0f},{y2 - 4:.0f} {x2:.0f},{y2 - 18:.0f} {x2:.0f},{y2:.0f}"
        )

    def _lane(self, start: str) -> float:
        """One for all arrows from a box that go beside others."""
        if start in self._lanes:
            return self._lanes[start]
        first, last = self._row[start], max(self._row[arrow.end] for arrow in self._out[start])
        x = max(self._right[first : last + 1]) + _LANE
        for other in sorted(other for begin, end, other in self._taken if first < end and begin < last):
            if abs(x - other) < _LANE:
                x = other + _LANE
        self._taken.append((first, last, x))
        self._lanes[start] = x
        return x
