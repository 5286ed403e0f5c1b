"""The report as a bar chart in SVG: how much faster than eager each competitor is."""

from __future__ import annotations

from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.analysis import relative_to
from benchmarks.record import Report

BASE = "eager"
COLORS = ("#8a8f98", "#5b8def", "#2a4d9b", "#e0912f", "#4caf7d", "#1b7f4b", "#8fbf3f", "#7d3fa8")

WIDTH = 860
LEFT = 120  # where bars begin
RIGHT = 70  # room for the numbers
BAR = 14
GAP = 18  # between workloads
TOP = 76


@dataclass(frozen=True)
class Bar:
    """One competitor on one workload: its speed in units of eager's, None if it was excluded."""

    peer: str
    speed: float | None


def chart(report: Report) -> str:
    """The chart as the text of an SVG file."""
    groups = bars(report)
    names = list(dict.fromkeys(bar.peer for group in groups.values() for bar in group))
    color = dict(zip(names, COLORS, strict=False))
    longest = max((bar.speed or 0.0 for group in groups.values() for bar in group), default=1.0)
    unit = (WIDTH - LEFT - RIGHT) / max(longest, 1.0)
    bottom = TOP + sum(BAR * len(group) + GAP for group in groups.values())
    parts = [title(), *legend(names, color), line(LEFT + unit, TOP - 6, bottom - GAP + 6)]
    y = TOP
    for workload, group in groups.items():
        middle = y + BAR * len(group) / 2 + 4
        parts.append(text(LEFT - 8, middle, workload, anchor="end"))
        for bar in group:
            parts += drawn(bar, y, unit, color[bar.peer])
            y += BAR
        y += GAP
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
        f'role="img" aria-label="steps per second of each competitor" font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def bars(report: Report) -> dict[str, list[Bar]]:
    """The bars of each workload."""
    groups = {}
    for result in report.results:
        speed = relative_to(result, BASE)
        groups[result.workload] = [Bar(measured.peer, speed(measured)) for measured in result.measured]
    return groups


def title() -> str:
    """What the bars mean."""
    return text(
        12, 22, "Steps per second, eager PyTorch = 1 (median of paired rounds; longer is faster)", size=15
    )


def legend(names: list[str], color: dict[str, str]) -> list[str]:
    """A colored square for each competitor."""
    parts, x = [], 12
    for name in names:
        parts.append(f'<rect x="{x}" y="38" width="11" height="11" fill="{color[name]}"/>')
        parts.append(text(x + 15, 48, name))
        x += 15 + 7 * len(name) + 12
    return parts


def drawn(bar: Bar, y: float, unit: float, color: str) -> list[str]:
    """A bar and its number."""
    if bar.speed is None:
        return [text(LEFT + 4, y + BAR - 3, f"{bar.peer}: excluded", color="#888888", size=10)]
    length = bar.speed * unit
    return [
        f'<rect x="{LEFT}" y="{y + 1}" width="{length:.1f}" height="{BAR - 2}" fill="{color}"/>',
        text(LEFT + length + 4, y + BAR - 3, f"{bar.speed:.2f}", size=10),
    ]


def line(x: float, y0: float, y1: float) -> str:
    """The line of eager's speed."""
    return f'<line x1="{x:.1f}" y1="{y0}" x2="{x:.1f}" y2="{y1}" stroke="#333333" stroke-dasharray="3 3"/>'


def text(
    x: float, y: float, words: str, *, anchor: str = "start", color: str = "#222222", size: int = 12
) -> str:
    """A line of words, which can be read on a line too."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-size="{size}" '
    place += 'stroke="white" stroke-width="3" paint-order="stroke"'
    return f"<text {place}>{escape(words)}</text>"
