"""The picture of a step's memory: the curve over its ops, and who holds the peak."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Protocol

from monograph.inspect.memory.picture import Label, Picture, Rectangle
from monograph.inspect.memory.point import Point
from monograph.ir.text import bytes_text, shortened

_AGAIN: Final = "computed again"
_PHASES: Final = {"forward": "#8ce99a", "backward": "#ffa8a8", _AGAIN: "#ffd43b", "update": "#b197fc"}
_STATE, _ARGUMENTS, _OTHER, _LINE, _DIM, _MARK = (
    "#a5d8ff",
    "#d0ebff",
    "#ced4da",
    "#dee2e6",
    "#6a737d",
    "#c92a2a",
)
_BAR: Final = "#748ffc"  # of no phase
_WIDTH, _HEIGHT = 960, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 640, 56, 360  # of the curve
_BARS, _BARS_END, _ROW = 672, 944, 30
_LETTERS: Final = 92  # in a line below the title
_TICKS: Final = 5
_STILL: Final = 0.005  # of the peak: ops that change less are narrow
_NARROW: Final = 0.02


class Charted(Protocol):
    """What is drawn of a report."""

    @property
    def graph(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def argument_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def peak(self) -> Point: ...
    @property
    def timeline(self) -> tuple[Point, ...]: ...
    def by_kind(self) -> Mapping[str, int]: ...


def drawn(report: Charted) -> Picture:
    """The picture."""
    picture = Picture(_WIDTH, _HEIGHT)
    title = f"{report.graph} on {report.backend}: {bytes_text(report.total_bytes)} at the peak"
    picture.labels += [Label(16, 22, title), Label(16, 38, shortened(_place(report.peak), _LETTERS), _DIM)]
    _curve(picture, report)
    _bars(picture, report)
    return picture


# --- the curve -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """Ops that follow each other, of one phase, in one place of the curve: the one that holds most of them."""

    x: float
    width: float
    phase: str
    point: Point


def _curve(picture: Picture, report: Charted) -> None:
    held = report.state_bytes + report.argument_bytes
    top = max(report.total_bytes, 1)

    def height(count: float) -> float:
        return count / top * (_BOTTOM - _TOP)

    for tick in _ticks(top):
        y = _BOTTOM - height(tick)
        picture.rectangles.append(Rectangle(_LEFT, y, _RIGHT - _LEFT, 0.5, _LINE))
        picture.labels.append(Label(_LEFT - 8, y + 4, bytes_text(tick), _DIM, at_end=True))
    base, at = float(_BOTTOM), float(_LEFT)
    for name, count, color in (
        ("state", report.state_bytes, _STATE),
        ("arguments", report.argument_bytes, _ARGUMENTS),
    ):
        base -= height(count)
        note = f"{name}: {bytes_text(count)}"
        picture.rectangles += [
            Rectangle(_LEFT, base, _RIGHT - _LEFT, height(count), color, note),
            Rectangle(at, _BOTTOM + 33, 8, 8, color),
        ]
        picture.labels.append(Label(at + 14, _BOTTOM + 40, note, _DIM))
        at += 170
    columns = list(_columns(report.timeline, top))
    for column in columns:
        most = height(column.point.running_bytes)
        color, note = _PHASES.get(column.phase, _OTHER), _place(column.point)
        picture.rectangles.append(Rectangle(column.x, base - most, column.width, most, color, note))
    _phases(picture, columns)
    peak = next((column for column in columns if column.point.op == report.peak.op), None)
    if peak is not None:
        y = _BOTTOM - height(held + report.peak_bytes)
        picture.rectangles.append(Rectangle(peak.x, y - 6, max(peak.width, 2), 6, _MARK, "the peak"))
        is_late = peak.x > (_LEFT + _RIGHT) / 2
        x = peak.x - 4 if is_late else peak.x + max(peak.width, 2) + 4
        picture.labels.append(Label(x, y, "peak", _MARK, at_end=is_late))


def phase_of(point: Point) -> str:
    """The phase of an op, or that it computes something again."""
    return _AGAIN if point.where.again else point.where.phase


def widths(timeline: Sequence[Point], most: int) -> list[float]:
    """How wide ops are, compared with each other: those that change little of what is held, such as single numbers, are narrow.

    `most` is what is held at the peak, in bytes.
    """
    before = [0, *(point.running_bytes for point in timeline)]
    return [
        1.0 if abs(point.running_bytes - last) > _STILL * most else _NARROW
        for point, last in zip(timeline, before, strict=False)
    ]


def _columns(timeline: Sequence[Point], most: int) -> Iterator[_Column]:
    """One for each op; if there are more ops than pixels, one for each pixel at most."""
    is_long = len(timeline) > _RIGHT - _LEFT
    weights = widths(timeline, most)
    scale = (_RIGHT - _LEFT) / max(sum(weights), _NARROW)
    x, width = float(_LEFT), 0.0
    points: list[Point] = []
    for number, (point, weight) in enumerate(zip(timeline, weights, strict=True), 1):
        points.append(point)
        width += weight * scale
        if width >= 1.0 or number == len(timeline) or not is_long:
            highest = max(points, key=lambda item: item.running_bytes)
            yield _Column(x, width, phase_of(highest), highest)
            x, width, points = x + width, 0.0, []


def _phases(picture: Picture, columns: Sequence[_Column]) -> None:
    """A band with the names of the phases below the curve."""
    for phase, together in groupby(columns, key=lambda column: column.phase):
        run = list(together)
        width = run[-1].x + run[-1].width - run[0].x
        picture.rectangles.append(
            Rectangle(run[0].x, _BOTTOM + 4, width, 6, _PHASES.get(phase, _OTHER), phase or "other ops")
        )
    for index, phase in enumerate(dict.fromkeys(column.phase for column in columns if column.phase)):
        x = _LEFT + 110 * index
        picture.rectangles.append(Rectangle(x, _BOTTOM + 17, 8, 8, _PHASES.get(phase, _OTHER)))
        picture.labels.append(Label(x + 14, _BOTTOM + 24, phase, _DIM))
    picture.labels.append(
        Label(_RIGHT, _BOTTOM + 40, "op by op; a small change is narrow", _DIM, at_end=True)
    )


def _ticks(top: int) -> list[int]:
    """Round numbers of bytes from 0 on, a few of them."""
    unit = 1024 ** min(int(math.log(max(top, 1), 1024)), 3)
    rough = max(top / unit / _TICKS, 1e-9)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor for factor in (1, 2, 5, 10) if factor * power >= rough) * power * unit
    return [round(index * step) for index in range(math.floor(top / max(step, 1)) + 1)]


def _place(point: Point) -> str:
    return f"{point.op}: {bytes_text(point.running_bytes)} made by the step, {point.where}".rstrip(", ")


# --- who holds the peak ----------------------------------------------------------------------------------------------


def _bars(picture: Picture, report: Charted) -> None:
    picture.labels.append(Label(_BARS, _TOP, "held at the peak"))
    kinds = report.by_kind()
    most = max(kinds.values(), default=1)
    for row, (kind, nbytes) in enumerate(list(kinds.items())[: (_BOTTOM - _TOP) // _ROW]):
        y = _TOP + 12 + row * _ROW
        share = f"{bytes_text(nbytes)}, {nbytes / report.total_bytes:.1%}"
        picture.labels += [Label(_BARS, y + 10, kind), Label(_BARS_END, y + 10, share, _DIM, at_end=True)]
        picture.rectangles.append(Rectangle(_BARS, y + 14, nbytes / most * (_BARS_END - _BARS), 8, _BAR))
