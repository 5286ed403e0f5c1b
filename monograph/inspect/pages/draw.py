"""The graph as a drawing: DOT for Graphviz, or SVG without it."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from monograph.errors import DefinitionError, shown
from monograph.inspect.pages.boxes import Arrow, Box, Panel, all_arrows, panels
from monograph.inspect.pages.layout import LINE, WIDEST, Placed, placed
from monograph.inspect.suggestions import no_ops_in
from monograph.ir.meta import origin
from monograph.ir.program import Program
from monograph.ir.text import bytes_text, count_text
from monograph.passes.inductor.inline_parts import inline_parts

_COLORS: Final = {"forward": "#d3f9d8", "backward": "#ffe3e3", "update": "#e5dbff"}
_OTHER: Final = "#f1f3f5"
_LEGEND, _BETWEEN = 48, 40  # the height of the legend, and what is between two phases
_LEAST, _MOST = 1.0, 7.0  # widths of arrows


def draw(
    path: str | Path, program: Program, module: str | None, depth: int | None, kinds: Mapping[str, str]
) -> None:
    """Write a drawing of the ops of `module` (of the whole step for None), with what they read from outside of it.

    `kinds` are the names of the classes of modules, by path.
    """
    target = Path(path)
    if target.suffix not in (".dot", ".svg"):
        raise DefinitionError(
            f"draw({str(path)!r}): drawings are DOT or SVG files", hint='draw("step.svg", module="model.fc")'
        )
    if depth is not None and (not isinstance(depth, int) or depth < 0):
        raise DefinitionError(
            f"draw(depth={shown(depth)})", hint="how many levels of modules are opened, from 0 on"
        )
    whole = inline_parts(program)
    found = panels(whole, module, depth, kinds)
    if not found:
        raise no_ops_in(str(module), {origin(node).module for node in whole.graph.nodes})
    target.write_text(_dot(found) if target.suffix == ".dot" else _svg(found, module))


def _width(arrow: Arrow, widest: int) -> float:
    """Arrows are as wide as their bytes, on the scale of square roots."""
    return _LEAST + (_MOST - _LEAST) * math.sqrt(arrow.nbytes / widest)


def _widest(found: Sequence[Panel]) -> int:
    return max([arrow.nbytes for arrow in all_arrows(found)], default=0) or 1


def _color(box: Box) -> str:
    return _COLORS.get(box.phase, _OTHER) if box.phase else "#ffffff"


# --- DOT -------------------------------------------------------------------------------------------------------------


def _dot(found: Sequence[Panel]) -> str:
    lines = [
        "digraph step {",
        "  compound=true;",
        '  node [shape=box, style=filled, fontname="sans-serif", fontsize=10];',
    ]
    for panel in found:
        lines += _dot_frame(panel.frame, panel.phase, _widest(found))
    return "\n".join([*lines, "}"]) + "\n"


def _dot_frame(frame: Box, phase: str, widest: int) -> Iterator[str]:
    def name(box: Box) -> str:
        return _quoted(f"{phase}/{box.name}")

    def leaf(box: Box) -> Box:  # Graphviz has arrows from op to op, which end at a frame
        return leaf(box.boxes[0]) if box.boxes else box

    yield f"  subgraph {_quoted(f'cluster_{phase}/{frame.name}')} {{ label={_quoted(frame.lines[0])};"
    known = {box.name: box for box in frame.boxes}
    for box in frame.boxes:
        if box.boxes:
            yield from _dot_frame(box, phase, widest)
        else:
            label = _quoted("\n".join(box.lines))
            yield f"  {name(box)} [label={label}, fillcolor={_quoted(_color(box))}, tooltip={_quoted(box.note)}];"
    yield "  }"
    for arrow in frame.arrows:
        start, end = known[arrow.start], known[arrow.end]
        ends = [
            f"{key}={_quoted(f'cluster_{phase}/{box.name}')}"
            for key, box in (("ltail", start), ("lhead", end))
            if box.boxes
        ]
        about = ", ".join(
            [f"penwidth={_width(arrow, widest):.1f}", f"tooltip={_quoted(bytes_text(arrow.nbytes))}", *ends]
        )
        yield f"  {name(leaf(start))} -> {name(leaf(end))} [{about}];"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# --- SVG -------------------------------------------------------------------------------------------------------------


def _svg(found: Sequence[Panel], module: str | None) -> str:
    """Each phase on its own, one beside the other."""
    drawn = [placed(panel.frame) for panel in found]
    widest = _widest(found)
    width = max(sum(item.width for item in drawn) + _BETWEEN * len(drawn), 560)
    height = max(item.height for item in drawn) + _LEGEND + 24
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="sans-serif" font-size="11" fill="#212529">',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto" markerUnits="userSpaceOnUse">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#868e96"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        *_legend(found, module, widest),
    ]
    x = _BETWEEN / 2
    for item in drawn:
        item.x, item.y = x, float(_LEGEND)
        lines += _drawn(item, 0, 0, widest)
        x += item.width + _BETWEEN
    return "\n".join([*lines, "</svg>"]) + "\n"


def _legend(found: Sequence[Panel], module: str | None, widest: int) -> Iterator[str]:
    folded = count_text(sum(panel.num_folded for panel in found), "view")
    text = f"{module or 'the whole step'}: {folded} folded; an arrow is as wide as its bytes, the widest has {bytes_text(widest)}"
    yield f'<text x="20" y="18" font-weight="bold">{_escaped(text)}</text>'
    x = 20
    for panel in found:
        color = _COLORS.get(panel.phase, _OTHER)
        yield f'<rect x="{x}" y="27" width="12" height="12" fill="{color}" stroke="#868e96"/>'
        yield f'<text x="{x + 17}" y="37">{_escaped(panel.phase)}</text>'
        x += 90
    yield f'<rect x="{x}" y="27" width="12" height="12" fill="#ffffff" stroke="#868e96"/><text x="{x + 17}" y="37">from outside</text>'


def _drawn(item: Placed, x: float, y: float, widest: int) -> Iterator[str]:
    """A box at its place in a frame whose corner is (x, y), and what is in it."""
    x, y, box = x + item.x, y + item.y, item.box
    is_frame = bool(box.boxes)
    fill, stroke = ("none", "#868e96") if is_frame else (_color(box), "#adb5bd")
    dashed = ' stroke-dasharray="4 3"' if is_frame else ""
    yield (
        f'<g><title>{_escaped(box.note or box.name)}</title><rect x="{x:.0f}" y="{y:.0f}" width="{item.width:.0f}" '
        f'height="{item.height:.0f}" rx="5" fill="{fill}" stroke="{stroke}"{dashed}/>'
    )
    for number, line in enumerate(box.lines):
        style = 'font-weight="bold"' if not number else 'fill="#495057"'
        yield f'<text x="{x + 8:.0f}" y="{y + 15 + LINE * number:.0f}" {style}>{_escaped(_cut(line))}</text>'
    yield "</g>"
    for arrow, path in item.paths:
        yield (
            f'<path transform="translate({x:.0f} {y:.0f})" d="{path}" fill="none" stroke="#868e96" stroke-opacity="0.7" '
            f'stroke-width="{_width(arrow, widest):.1f}" marker-end="url(#tip)"><title>{bytes_text(arrow.nbytes)}</title></path>'
        )
    for inner in item.inside:
        yield from _drawn(inner, x, y, widest)


def _escaped(text: str) -> str:
    return html.escape("".join(letter if letter.isprintable() else " " for letter in text))


def _cut(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 1]}…"
